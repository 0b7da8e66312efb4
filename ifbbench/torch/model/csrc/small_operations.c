/* The elementwise steps of a decoder, between its matrix products and its attention. */

#include "exponential.h"

/* out[r] = x[r] / sqrt(mean(x[r]^2) + eps) * weight, for each of `rows` rows of `size` values. */
void NAME(rms_norm)(const value_t *x, const value_t *weight, value_t *out, int64_t rows, int64_t size, float eps) {
#pragma omp parallel for if (rows * size > PARALLEL_VALUES)
  for (int64_t r = 0; r < rows; r++) {
    const value_t *from = x + r * size;
    value_t *to = out + r * size;
    float sum = 0;
    for (int64_t i = 0; i < size; i++) sum += to_float(from[i]) * to_float(from[i]);
    float scale = 1 / sqrtf(sum / size + eps);
    for (int64_t i = 0; i < size; i++) to[i] = to_value(to_float(from[i]) * scale * to_float(weight[i]));
  }
}

/* out[r, i] = silu(x[r, i]) * x[r, size + i]: a row holds gate, then up. */
void NAME(swiglu)(const value_t *x, value_t *out, int64_t rows, int64_t size) {
#pragma omp parallel for if (rows * size > PARALLEL_VALUES)
  for (int64_t r = 0; r < rows; r++) {
    const value_t *gate = x + r * 2 * size, *up = gate + size;
    for (int64_t i = 0; i < size; i++) {
      float g = to_float(gate[i]);
      out[r * size + i] = to_value(g / (1 + exponential(-g)) * to_float(up[i]));
    }
  }
}

/* Rotate the first `heads` of each token's `stride / size` heads in place: (a, b) -> (a cos - b sin, b cos + a sin),
 * with a and b the halves of a head. cos, sin: [positions, size / 2], of the angles of each position. */
void NAME(rotate)(value_t *x, const int64_t *positions, const float *cos, const float *sin, int64_t tokens,
                  int64_t heads, int64_t stride, int64_t size) {
  int64_t half = size / 2;
#pragma omp parallel for if (tokens * heads * size > PARALLEL_VALUES)
  for (int64_t t = 0; t < tokens; t++) {
    const float *c = cos + positions[t] * half, *s = sin + positions[t] * half;
    for (int64_t h = 0; h < heads; h++) {
      value_t *restrict a = x + t * stride + h * size, *restrict b = a + half;
      for (int64_t i = 0; i < half; i++) {
        float first = to_float(a[i]), second = to_float(b[i]);
        a[i] = to_value(first * c[i] - second * s[i]);
        b[i] = to_value(second * c[i] + first * s[i]);
      }
    }
  }
}

/* keys_cache[rows[t]] = keys[t], and values likewise. A token's keys are `size` values in a row of `stride`. */
void NAME(write)(const value_t *keys, const value_t *values, value_t *keys_cache, value_t *values_cache,
                 const int64_t *rows, int64_t tokens, int64_t stride, int64_t size) {
  for (int64_t t = 0; t < tokens; t++) {
    memcpy(keys_cache + rows[t] * size, keys + t * stride, size * sizeof(value_t));
    memcpy(values_cache + rows[t] * size, values + t * stride, size * sizeof(value_t));
  }
}
