/* Attention of a unit with many queries, block of keys by block of keys, with an online softmax (Milakov and
 * Gimelshein, arXiv:1805.02867; Dao et al., arXiv:2205.14135).
 *
 * A row is a query in one of the heads that share a KV head; the rows of a query are consecutive. Rows are packed into
 * tiles as in products.c, KEYS keys are transposed into a panel [size, KEYS], and their values form a panel
 * [KEYS, COLUMNS] for each COLUMNS of their size. */

#ifndef IFBBENCH_ATTENTION_CHUNK_H
#define IFBBENCH_ATTENTION_CHUNK_H

#include "attention_unit.h"
#include "exponential.h"

/* Maximum number of queries of a unit: enough to repay transposing the keys, few enough for the processor's cache. */
#define CHUNK_QUERIES 64
#define KEYS COLUMNS

/* Scratch space of a unit. queries: tiles [size, rows of the tile]. sums: [rows, wide], weighted sums of values.
 * largest, total: [rows], the largest score so far and the sum of weights. keys, values: panels. scores: [rows of a
 * tile, KEYS], then weights. product: [rows of a tile, COLUMNS]. */
typedef struct {
  float *queries, *sums, *largest, *total, *keys, *values, *scores, *product;
  int64_t rows, tiles, wide;
} chunk_t;

static int64_t chunk_scratch_floats(int64_t size, int64_t group) {
  int64_t rows = CHUNK_QUERIES * group, wide = rounded_up(size, COLUMNS);
  return rows * (size + wide + 2) + (size + wide + 2 * MAX_ROWS) * KEYS;
}

static chunk_t chunk_in(const batch_t *b, const unit_t *u, float *scratch) {
  chunk_t c = {.rows = u->count * b->group, .wide = rounded_up(b->size, COLUMNS)};
  c.tiles = tiles_of(c.rows);
  c.queries = scratch;
  c.sums = c.queries + c.rows * b->size;
  c.largest = c.sums + c.rows * c.wide;
  c.total = c.largest + c.rows;
  c.keys = c.total + c.rows;
  c.values = c.keys + b->size * KEYS;
  c.scores = c.values + c.wide * KEYS;
  c.product = c.scores + MAX_ROWS * KEYS;
  return c;
}

static void load_queries(const batch_t *b, const unit_t *u, chunk_t *c) {
  float scale = 1 / sqrtf(b->size);
  memset(c->sums, 0, c->rows * c->wide * sizeof(float));
  for (int64_t t = 0; t < c->tiles; t++) {
    int64_t first = first_row(t, c->rows, c->tiles), rows = first_row(t + 1, c->rows, c->tiles) - first;
    for (int64_t r = 0; r < rows; r++) {
      const value_t *query = queries_of(b, u) + (first + r) / b->group * b->stride + (first + r) % b->group * b->size;
      for (int64_t i = 0; i < b->size; i++) c->queries[first * b->size + i * rows + r] = to_float(query[i]) * scale;
      c->largest[first + r] = -INFINITY, c->total[first + r] = 0;
    }
  }
}

/* Load the next `count` keys and values as panels, padded with zeros. */
static void load_keys(const batch_t *b, chunk_t *c, cursor_t *key, cursor_t *value, int64_t count) {
  if (count < KEYS) memset(c->keys, 0, (b->size + c->wide) * KEYS * sizeof(float));
  for (int64_t k = 0; k < count; k++) {
    for (int64_t i = 0; i < b->size; i++) c->keys[i * KEYS + k] = to_float(key->at[i]);
    for (int64_t first = 0; first < b->size; first += COLUMNS) {
      float *to = c->values + (first / COLUMNS * KEYS + k) * COLUMNS;
      for (int64_t i = 0; i < at_most(COLUMNS, b->size - first); i++) to[i] = to_float(value->at[first + i]);
    }
    advance(key), advance(value);
  }
}

/* product[rows, COLUMNS] = tile times panel[steps, COLUMNS]; the strides of the tile are those of `add_product`. */
static void multiply_floats(int64_t rows, const float *tile, int64_t row_stride, int64_t step_stride,
                            const float *panel, int64_t steps, float *product) {
#define MULTIPLY(n)                                                                                \
  {                                                                                                \
    vector sum[n][2] = {0};                                                                        \
    add_product(n, add_float_step, sum, (const uint32_t *)tile, row_stride, step_stride,           \
                (const uint32_t *)panel, steps);                                                   \
    memcpy(product, sum, sizeof sum);                                                              \
  }
  WITH_CONSTANT(rows, MULTIPLY)
#undef MULTIPLY
}

/* Turn a row's scores of the first `seen` of KEYS keys into weights. Returns the factor for the row's earlier sums,
 * which accounts for a new largest score. */
INLINE float weigh(float *scores, int64_t seen, float *largest, float *total) {
  float sum = 0;
  for (int64_t k = seen < 0 ? 0 : seen; k < KEYS; k++) scores[k] = -INFINITY;
  float maximum = largest_of(scores, KEYS, *largest);
  for (int64_t k = 0; k < KEYS; k++) scores[k] = exponential(scores[k] - maximum), sum += scores[k];
  float shrink = exponential(*largest - maximum);
  *total = *total * shrink + sum;
  *largest = maximum;
  return shrink;
}

/* Add the panels to the sums of a tile's rows. seen_by_first: number of the panels' keys that the unit's first query
 * sees. */
static void attend_tile(const batch_t *b, chunk_t *c, int64_t first, int64_t rows, int64_t seen_by_first) {
  float shrink[MAX_ROWS];
  multiply_floats(rows, c->queries + first * b->size, 1, rows, c->keys, b->size, c->scores);
  for (int64_t r = 0; r < rows; r++) {
    int64_t row = first + r;
    shrink[r] = weigh(c->scores + r * KEYS, seen_by_first + row / b->group, c->largest + row, c->total + row);
  }
  for (int64_t column = 0; column < c->wide; column += COLUMNS) {
    multiply_floats(rows, c->scores, KEYS, 1, c->values + column * KEYS, KEYS, c->product);
    for (int64_t r = 0; r < rows; r++) {
      float *sum = c->sums + (first + r) * c->wide + column, *more = c->product + r * COLUMNS;
      for (int i = 0; i < COLUMNS; i++) sum[i] = sum[i] * shrink[r] + more[i];
    }
  }
}

/* scratch: of `chunk_scratch_floats` floats. */
static void attend_chunk(const batch_t *b, const unit_t *u, float *scratch) {
  chunk_t c = chunk_in(b, u, scratch);
  load_queries(b, u, &c);
  cursor_t key = first_of(b, u, b->keys), value = first_of(b, u, b->values);
  for (int64_t place = 0; place < u->length; place += KEYS) {
    int64_t seen_by_first = u->length - u->count + 1 - place;
    load_keys(b, &c, &key, &value, at_most(KEYS, u->length - place));
    for (int64_t t = 0; t < c.tiles; t++) {
      int64_t first = first_row(t, c.rows, c.tiles), end = first_row(t + 1, c.rows, c.tiles);
      if (seen_by_first + (end - 1) / b->group > 0) attend_tile(b, &c, first, end - first, seen_by_first);
    }
  }
  for (int64_t r = 0; r < c.rows; r++) {
    value_t *to = results_of(b, u) + r / b->group * b->kv_heads * b->group * b->size + r % b->group * b->size;
    for (int64_t i = 0; i < b->size; i++) to[i] = to_value(c.sums[r * c.wide + i] / c.total[r]);
  }
}

#endif
