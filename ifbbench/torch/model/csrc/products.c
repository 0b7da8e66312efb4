/* Matrix products with a fixed weight, for the one to several hundred rows of a batch.
 *
 * The algorithm of Goto and van de Geijn ("Anatomy of High-Performance Matrix Multiplication", 2008), without blocks
 * over the inputs, because a panel of weights fits into the L2 cache: a tile of results stays in registers while a
 * panel is read. With few rows the product is bound by reading weights from memory, so while a panel is multiplied the
 * next one is prefetched, a part with each tile.
 *
 * A weight is packed once: panels of COLUMNS outputs, each [steps, COLUMNS]. A step is 32 bits of inputs, one float or
 * two bf16, so that both types have the same layout. Rows are packed at each call, into tiles of [steps, rows]. */

#include <stdlib.h>

#include "vectors.h"

#if defined(BF16) && defined(__AVX512BF16__)
#include <immintrin.h>
#endif

/* Tiles multiplied with a panel before the next panel: these tiles and the panel stay in the L2 cache. */
#define MAX_TILES 8
/* Steps between prefetches: each fetches few enough cache lines not to evict what is being multiplied. */
#define FETCH_STEPS 16
#define INPUTS_PER_STEP ((int64_t)(4 / sizeof(value_t)))

INLINE vector add_step(vector sum, uint32_t inputs, words weights) {
#if !defined(BF16)
  return add_float_step(sum, inputs, weights);
#elif defined(__AVX512BF16__)
  return (vector)_mm512_dpbf16_ps((__m512)sum, (__m512bh)_mm512_set1_epi32((int)inputs), (__m512bh)weights);
#else
  const uint32_t second = 0xFFFF0000u;
  sum = add_float_step(sum, inputs << 16, weights << 16);
  return add_float_step(sum, inputs & second, weights & second);
#endif
}

/* product[rows, COLUMNS] = tile[steps, rows] times panel[steps, COLUMNS]. Prefetches `lines` cache lines from `next` on
 * every FETCH_STEPS steps. */
static void multiply_tile(int64_t rows, const uint32_t *tile, const uint32_t *panel, int64_t steps, const char *next,
                          int64_t lines, float *product) {
#define MULTIPLY(n)                                                                                                \
  {                                                                                                                \
    vector sum[n][2] = {0};                                                                                        \
    for (int64_t first = 0; first < steps; first += FETCH_STEPS) {                                                 \
      for (int64_t line = 0; line < lines; line++, next += CACHE_LINE) __builtin_prefetch(next);                   \
      add_product(n, add_step, sum, tile + first * n, 1, n, panel + first * COLUMNS,                               \
                  at_most(FETCH_STEPS, steps - first));                                                            \
    }                                                                                                              \
    memcpy(product, sum, sizeof sum);                                                                              \
  }
  WITH_CONSTANT(rows, MULTIPLY)
#undef MULTIPLY
}

static void pack_tile(const value_t *from, uint32_t *to, int64_t rows, int64_t inputs) {
  int64_t whole = inputs / INPUTS_PER_STEP;
  for (int64_t r = 0; r < rows; r++, from += inputs) {
    for (int64_t s = 0; s < whole; s++) memcpy(to + s * rows + r, from + s * INPUTS_PER_STEP, 4);
    if (whole * INPUTS_PER_STEP == inputs) continue;
    to[whole * rows + r] = 0;
    memcpy(to + whole * rows + r, from + inputs - 1, sizeof(value_t));
  }
}

static int64_t steps_of(int64_t inputs) { return parts_of(inputs, INPUTS_PER_STEP); }
static int64_t panels_of(int64_t outputs) { return parts_of(outputs, COLUMNS); }
static int64_t columns_of(int64_t panel, int64_t outputs) { return at_most(COLUMNS, outputs - panel * COLUMNS); }

/* The first `columns` of product[rows, COLUMNS], plus `bias` unless it is null, to rows of `stride` values. */
INLINE void store_rows(const float *product, int64_t rows, const value_t *bias, value_t *to, int64_t columns,
                       int64_t stride) {
  for (int64_t r = 0; r < rows; r++, product += COLUMNS, to += stride)
    if (bias)
      for (int64_t c = 0; c < columns; c++) to[c] = to_value(product[c] + to_float(bias[c]));
    else
      for (int64_t c = 0; c < columns; c++) to[c] = to_value(product[c]);
}

/* Size of a packed weight [outputs, inputs] in 32-bit words. */
int64_t NAME(packed_words)(int64_t outputs, int64_t inputs) { return panels_of(outputs) * COLUMNS * steps_of(inputs); }

/* Pack `weight` [outputs, inputs]. Panels are padded with zeros. */
void NAME(pack)(const value_t *weight, uint32_t *packed, int64_t outputs, int64_t inputs) {
  int64_t panel_words = COLUMNS * steps_of(inputs);
#pragma omp parallel for
  for (int64_t p = 0; p < panels_of(outputs); p++) {
    uint32_t *panel = packed + p * panel_words;
    memset(panel, 0, 4 * panel_words);
    for (int64_t c = 0; c < columns_of(p, outputs); c++) {
      const value_t *from = weight + (p * COLUMNS + c) * inputs;
      for (int64_t i = 0; i < inputs; i++) {
        uint32_t *step = panel + i / INPUTS_PER_STEP * COLUMNS + c;
        memcpy((value_t *)step + i % INPUTS_PER_STEP, from + i, sizeof(value_t));
      }
    }
  }
}

/* out[rows, outputs] = x[rows, inputs] times a packed weight, plus `bias` [outputs] unless it is null. Returns 0, or 1
 * if there is not enough memory for the packed rows. */
int NAME(multiply)(const value_t *x, const uint32_t *packed, const value_t *bias, value_t *out, int64_t rows,
                   int64_t outputs, int64_t inputs) {
  int64_t steps = steps_of(inputs), panels = panels_of(outputs);
  int64_t tiles = tiles_of(rows), groups = parts_of(tiles, MAX_TILES);
  uint32_t *tiled = malloc(4 * rows * steps + 1);
  if (!tiled) return 1;
#pragma omp parallel
  {
#pragma omp for schedule(static)
    for (int64_t t = 0; t < tiles; t++) {
      int64_t row = first_row(t, rows, tiles);
      pack_tile(x + row * inputs, tiled + row * steps, first_row(t + 1, rows, tiles) - row, inputs);
    }
#pragma omp for collapse(2) schedule(static)
    for (int64_t g = 0; g < groups; g++)
      for (int64_t p = 0; p < panels; p++) {
        const uint32_t *panel = packed + p * COLUMNS * steps;
        const char *next = (const char *)(panel + COLUMNS * steps);
        int64_t first = g * tiles / groups, last = (g + 1) * tiles / groups;
        int64_t lines = parts_of(FETCH_STEPS * COLUMNS * 4 / CACHE_LINE, last - first);
        for (int64_t t = first; t < last; t++, next += steps / FETCH_STEPS * lines * CACHE_LINE) {
          int64_t row = first_row(t, rows, tiles), count = first_row(t + 1, rows, tiles) - row;
          float product[MAX_ROWS * COLUMNS];
          multiply_tile(count, tiled + row * steps, panel, steps, next, lines, product);
          store_rows(product, count, bias ? bias + p * COLUMNS : NULL, out + row * outputs + p * COLUMNS,
                     columns_of(p, outputs), outputs);
        }
      }
  }
  free(tiled);
  return 0;
}
