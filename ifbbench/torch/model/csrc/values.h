/* The type of values that kernels read and write: float32, or bfloat16 with -DBF16. Each source is compiled once for
 * each type; all arithmetic is in float32. */

#ifndef IFBBENCH_VALUES_H
#define IFBBENCH_VALUES_H

#include <stdint.h>
#include <string.h>

#define INLINE static inline __attribute__((always_inline))
#define CACHE_LINE 64
/* With fewer values a second thread costs more than it saves. */
#define PARALLEL_VALUES 32768

INLINE int64_t at_most(int64_t limit, int64_t value) { return value < limit ? value : limit; }
INLINE int64_t at_least(int64_t limit, int64_t value) { return value > limit ? value : limit; }
/* `count` divided by `size`, rounded up; and `count` rounded up to a multiple of `size`. */
INLINE int64_t parts_of(int64_t count, int64_t size) { return (count + size - 1) / size; }
INLINE int64_t rounded_up(int64_t count, int64_t size) { return parts_of(count, size) * size; }

INLINE float float_of_bits(uint32_t bits) {
  float value;
  memcpy(&value, &bits, 4);
  return value;
}

#ifdef BF16
#define NAME(function) function##_bf16
typedef uint16_t value_t;
INLINE float to_float(value_t value) { return float_of_bits((uint32_t)value << 16); }
INLINE value_t to_value(float value) { /* rounds to nearest, ties to even */
  uint32_t bits;
  memcpy(&bits, &value, 4);
  return (value_t)((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16);
}
#else
#define NAME(function) function##_float
typedef float value_t;
INLINE float to_float(value_t value) { return value; }
INLINE value_t to_value(float value) { return value; }
#endif

#endif
