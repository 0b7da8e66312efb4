#ifndef IFBBENCH_EXPONENTIAL_H
#define IFBBENCH_EXPONENTIAL_H

#include <math.h>

#include "values.h"

/* e^x with a relative error of 1e-7, as 2^n e^r with a polynomial for e^r (Cephes' expf); x is clamped to the range of
 * floats. Compilers do not vectorise the C library's function here. */
INLINE float exponential(float x) {
  x = x < -88.0f ? -88.0f : x > 89.0f ? 89.0f : x;
  float n = rintf(x * 1.44269504f);
  float r = (x - n * 0.693359375f) + n * 2.12194440e-4f;
  float p = 1.9875691500e-4f;
  p = p * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * r * r + r + 1.0f;
  return p * float_of_bits((uint32_t)((int32_t)n + 127) << 23);
}

#endif
