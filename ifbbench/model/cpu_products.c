/* Matrix products with a fixed weight, for the few to some hundred rows of a batch. `cpu_product.py` calls them.
 *
 * The way of Goto and van de Geijn ("Anatomy of High-Performance Matrix Multiplication", 2008), without their blocks
 * over inputs, for a panel of weights fits into the second cache: a tile of results stays in registers while one panel
 * passes by. With few rows the time goes into reading weights from memory, so while a panel is multiplied, the next one
 * is fetched, a part with each tile.
 *
 * The weight is packed once: panels of COLUMNS outputs, each [steps, COLUMNS]. A step is 32 bits of inputs, one float or
 * two bf16, so that both kinds have the same layout. The rows are packed at each call into tiles, [steps, rows]. */

#include <stdlib.h>

#include "cpu_values.h"

/* A tile's results, MOST_ROWS pairs of vectors, must fit into the registers beside a pair of weights and an input. */
#if defined(__AVX512F__)
#define LANES 16
#define MOST_ROWS 14
#elif defined(__AVX2__)
#define LANES 8
#define MOST_ROWS 6
#else
#define LANES 4
#define MOST_ROWS 6
#endif
#define COLUMNS (2 * LANES)
/* How many tiles pass by one panel before the next: their rows stay in the second cache, and so does the panel. */
#define MOST_TILES 8
#define CACHE_LINE 64
/* The part of the next panel that is fetched at a time, in steps: long enough to be no burden, short enough not to push
 * out of the first cache what is being multiplied. */
#define FETCH_STEPS 16

#if defined(__AVX512BF16__)
#include <immintrin.h>
#endif

typedef float vector __attribute__((vector_size(4 * LANES)));
typedef uint32_t words __attribute__((vector_size(4 * LANES)));

static inline vector add_step_float(vector sum, uint32_t input, words weights) {
  return sum + float_of_bits(input) * (vector)weights;
}

static inline vector add_step_bf16(vector sum, uint32_t inputs, words weights) {
#if defined(__AVX512BF16__)
  return (vector)_mm512_dpbf16_ps((__m512)sum, (__m512bh)_mm512_set1_epi32((int)inputs), (__m512bh)weights);
#else
  const uint32_t upper = 0xFFFF0000u; /* of two bf16 in a word, the second as a float */
  sum += float_of_bits(inputs << 16) * (vector)(weights << 16);
  return sum + float_of_bits(inputs & upper) * (vector)(weights & upper);
#endif
}

#define INLINE static inline __attribute__((always_inline))
#define STEPS(T, inputs) (((inputs) * (int64_t)sizeof(T) + 3) / 4)
#define PANELS(outputs) (((outputs) + COLUMNS - 1) / COLUMNS)

/* Rows go into tiles as even as can be: `tiles` of them share `rows`. */
INLINE int64_t first_row(int64_t tile, int64_t rows, int64_t tiles) { return tile * rows / tiles; }

/* The case of a tile with a known number of rows: loops over them are unrolled, and the sums stay in registers. */
#define TILE_CASE(T, count)                                                                                            \
  case count:                                                                                                          \
    if (count <= MOST_ROWS) tile_##T(count <= MOST_ROWS ? count : 1, inputs, weights, steps, next, lines, sums);       \
    break

#define PRODUCTS(T)                                                                                                    \
                                                                                                                       \
  /* sums[rows, COLUMNS] = a tile times a panel. Fetches `lines` cache lines from `next` on each FETCH_STEPS steps. */ \
  INLINE void tile_##T(const int rows, const uint32_t *restrict inputs, const uint32_t *restrict weights,              \
                       int64_t steps, const char *next, int64_t lines, float *sums) {                                  \
    vector sum[MOST_ROWS][2];                                                                                          \
    _Pragma("GCC unroll 16") for (int r = 0; r < rows; r++) sum[r][0] = sum[r][1] = (vector){0};                       \
    for (int64_t first = 0; first < steps; first += FETCH_STEPS) {                                                     \
      int64_t last = first + FETCH_STEPS < steps ? first + FETCH_STEPS : steps;                                        \
      for (int64_t line = 0; line < lines; line++, next += CACHE_LINE) __builtin_prefetch(next);                       \
      for (int64_t s = first; s < last; s++) {                                                                         \
        words left, right;                                                                                             \
        memcpy(&left, weights + s * COLUMNS, sizeof left);                                                             \
        memcpy(&right, weights + s * COLUMNS + LANES, sizeof right);                                                   \
        _Pragma("GCC unroll 16") for (int r = 0; r < rows; r++) {                                                      \
          sum[r][0] = add_step_##T(sum[r][0], inputs[s * rows + r], left);                                             \
          sum[r][1] = add_step_##T(sum[r][1], inputs[s * rows + r], right);                                            \
        }                                                                                                              \
      }                                                                                                                \
    }                                                                                                                  \
    _Pragma("GCC unroll 16") for (int r = 0; r < rows; r++) memcpy(sums + r * COLUMNS, sum[r], sizeof sum[r]);         \
  }                                                                                                                    \
                                                                                                                       \
  static void any_tile_##T(int64_t rows, const uint32_t *inputs, const uint32_t *weights, int64_t steps,               \
                           const char *next, int64_t lines, float *sums) {                                             \
    switch (rows) {                                                                                                    \
      TILE_CASE(T, 1);                                                                                                 \
      TILE_CASE(T, 2);                                                                                                 \
      TILE_CASE(T, 3);                                                                                                 \
      TILE_CASE(T, 4);                                                                                                 \
      TILE_CASE(T, 5);                                                                                                 \
      TILE_CASE(T, 6);                                                                                                 \
      TILE_CASE(T, 7);                                                                                                 \
      TILE_CASE(T, 8);                                                                                                 \
      TILE_CASE(T, 9);                                                                                                 \
      TILE_CASE(T, 10);                                                                                                \
      TILE_CASE(T, 11);                                                                                                \
      TILE_CASE(T, 12);                                                                                                \
      TILE_CASE(T, 13);                                                                                                \
      TILE_CASE(T, 14);                                                                                                \
    }                                                                                                                  \
  }                                                                                                                    \
                                                                                                                       \
  INLINE void pack_tile_##T(const T *from, uint32_t *to, int64_t rows, int64_t inputs) {                               \
    int64_t steps = STEPS(T, inputs), whole = inputs * (int64_t)sizeof(T) / 4;                                         \
    for (int64_t r = 0; r < rows; r++, from += inputs) {                                                               \
      for (int64_t s = 0; s < whole; s++) memcpy(to + s * rows + r, (const char *)from + 4 * s, 4);                    \
      if (whole < steps) to[whole * rows + r] = 0, memcpy(to + whole * rows + r, from + inputs - 1, sizeof(T));        \
    }                                                                                                                  \
  }                                                                                                                    \
                                                                                                                       \
  /* How many 32-bit words a packed weight [outputs, inputs] takes. */                                                 \
  int64_t packed_words_##T(int64_t outputs, int64_t inputs) {                                                          \
    return PANELS(outputs) * COLUMNS * STEPS(T, inputs);                                                               \
  }                                                                                                                    \
                                                                                                                       \
  /* Packs `weight` [outputs, inputs]; what is beyond it is zero. */                                                   \
  void pack_##T(const T *weight, uint32_t *packed, int64_t outputs, int64_t inputs) {                                  \
    int64_t panel = COLUMNS * STEPS(T, inputs);                                                                        \
    _Pragma("omp parallel for") for (int64_t p = 0; p < PANELS(outputs); p++) {                                        \
      int64_t columns = outputs - p * COLUMNS < COLUMNS ? outputs - p * COLUMNS : COLUMNS;                             \
      memset(packed + p * panel, 0, 4 * panel);                                                                        \
      for (int64_t c = 0; c < columns; c++) {                                                                          \
        const T *from = weight + (p * COLUMNS + c) * inputs;                                                           \
        for (int64_t i = 0; i < inputs; i++) {                                                                         \
          int64_t step = i * (int64_t)sizeof(T) / 4, part = i % (4 / (int64_t)sizeof(T));                              \
          memcpy((T *)(packed + p * panel + step * COLUMNS + c) + part, from + i, sizeof(T));                          \
        }                                                                                                              \
      }                                                                                                                \
    }                                                                                                                  \
  }                                                                                                                    \
                                                                                                                       \
  /* out[rows, outputs] = x[rows, inputs] times the packed weight, plus `bias` [outputs] unless that is null. Returns  \
   * 0, or 1 if there is no memory for packed rows. */                                                                 \
  int multiply_##T(const T *x, const uint32_t *packed, const T *bias, T *out, int64_t rows, int64_t outputs,           \
                   int64_t inputs) {                                                                                   \
    int64_t steps = STEPS(T, inputs), tiles = (rows + MOST_ROWS - 1) / MOST_ROWS;                                      \
    int64_t groups = (tiles + MOST_TILES - 1) / MOST_TILES;                                                            \
    uint32_t *tiled = malloc(4 * rows * steps + 1);                                                                    \
    if (!tiled) return 1;                                                                                              \
    _Pragma("omp parallel") {                                                                                          \
      _Pragma("omp for schedule(static)") for (int64_t t = 0; t < tiles; t++) {                                        \
        int64_t row = first_row(t, rows, tiles);                                                                       \
        pack_tile_##T(x + row * inputs, tiled + row * steps, first_row(t + 1, rows, tiles) - row, inputs);             \
      }                                                                                                                \
      _Pragma("omp for collapse(2) schedule(static)") for (int64_t g = 0; g < groups; g++)                             \
        for (int64_t p = 0; p < PANELS(outputs); p++) {                                                                \
          const uint32_t *panel = packed + p * COLUMNS * steps;                                                        \
          int64_t columns = outputs - p * COLUMNS < COLUMNS ? outputs - p * COLUMNS : COLUMNS;                         \
          int64_t first = g * tiles / groups, last = (g + 1) * tiles / groups;                                         \
          int64_t lines = (FETCH_STEPS * COLUMNS * 4 / CACHE_LINE + last - first - 1) / (last - first);                \
          const char *next = (const char *)(panel + COLUMNS * steps);                                                  \
          float sums[MOST_ROWS * COLUMNS];                                                                             \
          for (int64_t t = first; t < last; t++, next += steps / FETCH_STEPS * lines * CACHE_LINE) {                   \
            int64_t row = first_row(t, rows, tiles), count = first_row(t + 1, rows, tiles) - row;                      \
            any_tile_##T(count, tiled + row * steps, panel, steps, next, lines, sums);                                 \
            for (int64_t r = 0; r < count; r++) {                                                                      \
              T *to = out + (row + r) * outputs + p * COLUMNS;                                                         \
              const float *sum = sums + r * COLUMNS;                                                                   \
              const T *more = bias ? bias + p * COLUMNS : NULL;                                                        \
              for (int64_t c = 0; c < columns; c++) to[c] = to_##T(sum[c] + (more ? float_of_##T(more[c]) : 0));       \
            }                                                                                                          \
          }                                                                                                            \
        }                                                                                                              \
    }                                                                                                                  \
    free(tiled);                                                                                                       \
    return 0;                                                                                                          \
  }

PRODUCTS(float)
PRODUCTS(bf16)
