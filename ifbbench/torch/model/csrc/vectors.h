/* Vectors of the processor's width, and the tile of a matrix product that fits into its registers. */

#ifndef IFBBENCH_VECTORS_H
#define IFBBENCH_VECTORS_H

#include "values.h"

/* MAX_ROWS pairs of vectors, a tile's results, fit into the registers with a pair of weights and an input. */
#if defined(__AVX512F__)
#define LANES 16
#define MAX_ROWS 14
#elif defined(__AVX2__)
#define LANES 8
#define MAX_ROWS 6
#else
#define LANES 4
#define MAX_ROWS 6
#endif
#define COLUMNS (2 * LANES)

typedef float vector __attribute__((vector_size(4 * LANES)));
typedef uint32_t words __attribute__((vector_size(4 * LANES)));
typedef int32_t integers __attribute__((vector_size(4 * LANES)));

INLINE vector load_vector(const float *from) {
  vector result;
  memcpy(&result, from, sizeof result);
  return result;
}
INLINE void store_vector(float *to, vector from) { memcpy(to, &from, sizeof from); }

/* LANES values as floats. */
INLINE vector load_values(const value_t *from) {
#ifdef BF16
  uint16_t values __attribute__((vector_size(2 * LANES)));
  memcpy(&values, from, sizeof values);
  return (vector)(__builtin_convertvector(values, words) << 16);
#else
  return load_vector(from);
#endif
}

/* The first `count` of LANES values as floats, padded with zeros. */
INLINE vector load_some_values(const value_t *from, int64_t count) {
  value_t values[LANES] = {0};
  memcpy(values, from, count * sizeof(value_t));
  return load_values(values);
}

/* The lanes of `first` and `second`, numbered in this order, at the indices `which`, a constant. */
INLINE vector shuffled(vector first, vector second, integers which) {
#ifdef __clang__
  vector result;
  for (int i = 0; i < LANES; i++) result[i] = which[i] < LANES ? first[which[i]] : second[which[i] - LANES];
  return result;
#else
  return __builtin_shuffle(first, second, which);
#endif
}

/* sum + input * weights; each word is a float. */
INLINE vector add_float_step(vector sum, uint32_t input, words weights) {
  return sum + float_of_bits(input) * (vector)weights;
}

/* The sums of LANES vectors, as one vector: each round exchanges halves of two vectors, so that one addition sums
 * both. */
INLINE vector sums_of(vector *of) {
#define ROUND(half)                                                                      \
  if (half < LANES) {                                                                    \
    integers low, high;                                                                  \
    for (int i = 0; i < LANES; i++) {                                                    \
      low[i] = i & half ? LANES + i - half : i;                                          \
      high[i] = low[i] + half;                                                           \
    }                                                                                    \
    for (int i = 0; i < half; i++)                                                       \
      of[i] = shuffled(of[i], of[i + half], low) + shuffled(of[i], of[i + half], high);  \
  }
  ROUND(8)
  ROUND(4)
  ROUND(2)
  ROUND(1)
#undef ROUND
  return of[0];
}

/* The larger value of each lane. (Because of NaN, compilers do not vectorise a search for the maximum.) */
INLINE vector larger(vector first, vector second) {
  words is_first = (words)(first > second);
  return (vector)(((words)first & is_first) | ((words)second & ~is_first));
}

/* The largest of `least` and the floats at `from`, of `count` floats rounded up to whole vectors. */
INLINE float largest_of(const float *from, int64_t count, float least) {
  vector found = load_vector(from);
  for (int64_t i = LANES; i < count; i += LANES) found = larger(found, load_vector(from + i));
  for (int i = 0; i < LANES; i++) least = found[i] > least ? found[i] : least;
  return least;
}

typedef vector add_step_t(vector sum, uint32_t input, words weights);

/* sum[rows] += tile[rows, steps] times panel[steps, COLUMNS], word by word as `add_step` says. `rows` and `add_step`
 * must be constants where this is inlined, so that the sums stay in registers. The word of a row and a step is
 * tile[row * row_stride + step * step_stride]. */
INLINE void add_product(int rows, add_step_t add_step, vector sum[][2], const uint32_t *restrict tile,
                        int64_t row_stride, int64_t step_stride, const uint32_t *restrict panel, int64_t steps) {
  for (int64_t s = 0; s < steps; s++) {
    words left, right;
    memcpy(&left, panel + s * COLUMNS, sizeof left);
    memcpy(&right, panel + s * COLUMNS + LANES, sizeof right);
#pragma GCC unroll 16
    for (int r = 0; r < rows; r++) {
      uint32_t input = tile[r * row_stride + s * step_stride];
      sum[r][0] = add_step(sum[r][0], input, left);
      sum[r][1] = add_step(sum[r][1], input, right);
    }
  }
}

/* Rows are divided among tiles as evenly as possible. */
INLINE int64_t tiles_of(int64_t rows) { return parts_of(rows, MAX_ROWS); }
INLINE int64_t first_row(int64_t tile, int64_t rows, int64_t tiles) { return tile * rows / tiles; }

/* Calls `CALL(n)` with `count`, 1 to MAX_ROWS, as the constant n. */
#define WITH_CONSTANT(count, CALL)                        \
  switch (count) {                                        \
    case 1: CALL(1); break;                               \
    case 2: CALL(2); break;                               \
    case 3: CALL(3); break;                               \
    case 4: CALL(4); break;                               \
    case 5: CALL(5); break;                               \
    case 6: CALL(6); break;                               \
    WITH_CONSTANT_ABOVE_6(CALL)                           \
  }
#if MAX_ROWS > 6
#define WITH_CONSTANT_ABOVE_6(CALL) \
  case 7: CALL(7); break;           \
  case 8: CALL(8); break;           \
  case 9: CALL(9); break;           \
  case 10: CALL(10); break;         \
  case 11: CALL(11); break;         \
  case 12: CALL(12); break;         \
  case 13: CALL(13); break;         \
  case 14: CALL(14); break;
#else
#define WITH_CONSTANT_ABOVE_6(CALL)
#endif

#endif
