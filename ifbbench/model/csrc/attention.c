/* Paged attention of a mixed batch, with the softmax taken block by block (Milakov and Gimelshein, arXiv:1805.02867;
 * Dao et al., arXiv:2205.14135).
 *
 * The query heads that share a KV head are rows of one matrix. Generation has a few rows a sequence: there the time
 * goes into reading keys and values, which are used as they lie. A context chunk has many: there blocks of keys are
 * turned, so that both products are tiles as in products.c. */

#include <stdlib.h>

#include "exponential.h"
#include "vectors.h"

/* So many queries of a span, and all heads that share a KV head, are one unit of work. */
#define UNIT_QUERIES 64
/* Up to so many rows keys are not worth turning. */
#define FEW_ROWS 8
/* Rows that few-row attention takes at once, and vectors of a value whose sums it holds for each. */
#define STEP_ROWS 4
#define STEP_VECTORS 4
/* Keys that a context tile takes at once. */
#define KEYS COLUMNS
#ifndef AHEAD
#define AHEAD 16
#endif
#define CACHE_LINE 64

/* queries: rows of `stride` values, [heads, size] of each token; out: rows of heads * size. keys, values: [blocks,
 * in_block, kv_heads, size]. blocks: [spans, width]. `group` heads share a KV head. */
typedef struct {
  const value_t *queries;
  value_t *out;
  const value_t *keys, *values;
  const int64_t *blocks;
  int64_t width, stride, kv_heads, group, size, in_block;
} batch_t;

/* Some queries of a span, in one KV head: rows [row, row + count) of the batch, the last of which sees `length` keys. */
typedef struct {
  const int64_t *blocks;
  int64_t head, row, count, length;
} unit_t;

INLINE int64_t at_most(int64_t most, int64_t value) { return value < most ? value : most; }
INLINE int64_t rounded_up(int64_t size, int64_t multiple) { return (size + multiple - 1) / multiple * multiple; }

/* Goes through the keys, or values, of a unit. */
typedef struct {
  const value_t *at;
  const int64_t *block;
  int64_t left_in_block, left;
} cursor_t;

INLINE const value_t *block_of(const batch_t *b, const unit_t *u, const value_t *cache, int64_t block) {
  return cache + (block * b->in_block * b->kv_heads + u->head) * b->size;
}

INLINE cursor_t start(const batch_t *b, const unit_t *u, const value_t *cache) {
  return (cursor_t){block_of(b, u, cache, u->blocks[0]), u->blocks, b->in_block, u->length};
}

/* To the next one; from the last to nowhere. */
INLINE void advance(const batch_t *b, const unit_t *u, const value_t *cache, cursor_t *cursor) {
  if (--cursor->left <= 0) return;
  cursor->at += b->kv_heads * b->size;
  if (--cursor->left_in_block) return;
  cursor->left_in_block = b->in_block;
  cursor->at = block_of(b, u, cache, *++cursor->block);
}

/* Fetches what `cursor` is at, and moves it on. */
INLINE void fetch(const batch_t *b, const unit_t *u, const value_t *cache, int64_t size, cursor_t *cursor) {
  if (cursor->left <= 0) return;
  for (int64_t i = 0; i < size; i += CACHE_LINE / sizeof(value_t)) __builtin_prefetch(cursor->at + i);
  advance(b, u, cache, cursor);
}

/* The sums of LANES vectors, as one vector: in each round, half of the lanes of two vectors change places, so that one
 * addition serves both. */
INLINE vector sums_of(vector *of) {
#define ROUND(half)                                                                              \
  if (half < LANES) {                                                                            \
    integers low, high;                                                                          \
    for (int i = 0; i < LANES; i++) low[i] = i & half ? LANES + i - half : i, high[i] = low[i] + half; \
    for (int i = 0; i < half; i++)                                                               \
      of[i] = __builtin_shuffle(of[i], of[i + half], low) + __builtin_shuffle(of[i], of[i + half], high); \
  }
  ROUND(8)
  ROUND(4)
  ROUND(2)
  ROUND(1)
  return of[0];
}

/* scores[rows, score_stride] = queries[rows, query_stride] times the keys of a unit. `rows` and, for common sizes,
 * `size` are constants where this is inlined. */
INLINE void score_keys(const batch_t *b, const unit_t *u, int rows, int64_t size, const float *queries,
                       int64_t query_stride, float *scores, int64_t score_stride) {
  cursor_t key = start(b, u, b->keys), ahead = key;
  for (int k = 0; k < AHEAD; k++) fetch(b, u, b->keys, size, &ahead);
  for (int64_t first = 0; first < u->length; first += LANES) {
    vector dots[STEP_ROWS][LANES];
    for (int k = 0; k < LANES; k++) {
      fetch(b, u, b->keys, size, &ahead);
      vector dot[STEP_ROWS] = {0};
      for (int64_t i = 0; i < size; i += LANES) {
        vector part = size - i < LANES ? load_some_values(key.at + i, size - i) : load_values(key.at + i);
#pragma GCC unroll 4
        for (int r = 0; r < rows; r++) dot[r] += part * load_vector(queries + r * query_stride + i);
      }
#pragma GCC unroll 4
      for (int r = 0; r < rows; r++) dots[r][k] = dot[r];
      advance(b, u, b->keys, &key); /* behind the last, that one is scored again, in vain */
    }
#pragma GCC unroll 4
    for (int r = 0; r < rows; r++) store_vector(scores + r * score_stride + first, sums_of(dots[r]));
  }
}

/* out[rows, size] = weights[rows, weight_stride] times the values of a unit, `vectors` of a value at a time. */
INLINE void sum_values(const batch_t *b, const unit_t *u, int rows, int64_t size, int vectors, const float *weights,
                       int64_t weight_stride, value_t *out) {
  for (int64_t first = 0; first < size; first += vectors * LANES) {
    vector sum[STEP_ROWS][STEP_VECTORS] = {0};
    cursor_t value = start(b, u, b->values), ahead = value;
    for (int k = 0; k < AHEAD; k++) fetch(b, u, b->values, size, &ahead);
    for (int64_t n = 0; n < u->length; n++) {
      fetch(b, u, b->values, size, &ahead);
#pragma GCC unroll 4
      for (int v = 0; v < vectors; v++) {
        int64_t i = first + v * LANES;
        vector part = size - i < LANES ? load_some_values(value.at + i, size - i) : load_values(value.at + i);
#pragma GCC unroll 4
        for (int r = 0; r < rows; r++) sum[r][v] += weights[r * weight_stride + n] * part;
      }
      advance(b, u, b->values, &value);
    }
#pragma GCC unroll 4
    for (int r = 0; r < rows; r++)
      for (int64_t i = first; i < at_most(size, first + vectors * LANES); i++)
        out[r * size + i] = to_value(sum[r][(i - first) / LANES][(i - first) % LANES]);
  }
}

/* e^(scores - their largest), over the sum of these. */
static void softmax(float *scores, int64_t count) {
  float largest = scores[0], total = 0;
  for (int64_t n = 1; n < count; n++) largest = scores[n] > largest ? scores[n] : largest;
  for (int64_t n = 0; n < count; n++) scores[n] = exponential(scores[n] - largest), total += scores[n];
  for (int64_t n = 0; n < count; n++) scores[n] /= total;
}

INLINE void attend_rows(const batch_t *b, const unit_t *u, int rows, int64_t size, int vectors, const value_t *from,
                        value_t *to, float *scratch) {
  int64_t query_stride = rounded_up(size, LANES), score_stride = rounded_up(u->length, LANES);
  float *queries = scratch, *scores = queries + rows * query_stride, scale = 1 / sqrtf(size);
  for (int r = 0; r < rows; r++)
    for (int64_t i = 0; i < query_stride; i++) queries[r * query_stride + i] = i < size ? to_float(from[r * size + i]) * scale : 0;
  score_keys(b, u, rows, size, queries, query_stride, scores, score_stride);
  for (int r = 0; r < rows; r++) softmax(scores + r * score_stride, u->length);
  sum_values(b, u, rows, size, vectors, scores, score_stride, to);
}

#define ATTEND_ROWS(rows)                                                                     \
  switch (b->size) { /* the common sizes as constants, for loops without a remainder */       \
    case 32: attend_rows(b, u, rows, 32, 2, from, to, scratch); break;                        \
    case 64: attend_rows(b, u, rows, 64, STEP_VECTORS, from, to, scratch); break;             \
    case 128: attend_rows(b, u, rows, 128, STEP_VECTORS, from, to, scratch); break;           \
    default: attend_rows(b, u, rows, b->size, 1, from, to, scratch);                          \
  }

/* Attention of a unit with one query. */
static void attend_step(const batch_t *b, const unit_t *u, float *scratch) {
  const value_t *from = b->queries + u->row * b->stride + u->head * b->group * b->size;
  value_t *to = b->out + (u->row * b->kv_heads + u->head) * b->group * b->size;
  for (int64_t left = b->group; left > 0; left -= STEP_ROWS, from += STEP_ROWS * b->size, to += STEP_ROWS * b->size)
    switch (at_most(STEP_ROWS, left)) {
      case 1: ATTEND_ROWS(1); break;
      case 2: ATTEND_ROWS(2); break;
      case 3: ATTEND_ROWS(3); break;
      case 4: ATTEND_ROWS(4); break;
    }
}

/* product[rows, COLUMNS] = tile times panel; see `add_product`. */
static void multiply(int64_t rows, const float *tile, int64_t row_stride, int64_t step_stride, const float *panel,
                     int64_t steps, float *product) {
#define MULTIPLY(n)                                                                                                   \
  {                                                                                                                   \
    vector sum[n][2] = {0};                                                                                           \
    add_product(n, add_float_step, sum, (const uint32_t *)tile, row_stride, step_stride, (const uint32_t *)panel, steps); \
    memcpy(product, sum, sizeof sum);                                                                                 \
  }
  WITH_CONSTANT(rows, MULTIPLY)
}

/* Attention of a unit with several queries. A row is a query in one head; rows of a query follow each other. */
static void attend_chunk(const batch_t *b, const unit_t *u, float *scratch) {
  int64_t size = b->size, group = b->group, rows = u->count * group, wide = rounded_up(size, COLUMNS);
  int64_t tiles = (rows + MOST_ROWS - 1) / MOST_ROWS, first_seen = u->length - u->count + 1;
  float *queries = scratch, *sums = queries + rows * size, *largest = sums + rows * wide, *total = largest + rows;
  float *keys = total + rows, *values = keys + size * KEYS, *scores = values + wide * KEYS, *part = scores + MOST_ROWS * KEYS;
  float scale = 1 / sqrtf(size);
  const value_t *from = b->queries + u->row * b->stride + u->head * group * size;
  value_t *to = b->out + (u->row * b->kv_heads + u->head) * group * size;

  memset(sums, 0, rows * wide * sizeof(float));
  for (int64_t t = 0; t < tiles; t++) {
    int64_t row = t * rows / tiles, count = (t + 1) * rows / tiles - row;
    for (int64_t r = 0; r < count; r++) {
      const value_t *query = from + (row + r) / group * b->stride + (row + r) % group * size;
      for (int64_t i = 0; i < size; i++) queries[row * size + i * count + r] = to_float(query[i]) * scale;
      largest[row + r] = -INFINITY, total[row + r] = 0;
    }
  }
  cursor_t key = start(b, u, b->keys), value = start(b, u, b->values);
  for (int64_t first = 0; first < u->length; first += KEYS) {
    int64_t count_keys = at_most(KEYS, u->length - first);
    if (count_keys < KEYS) memset(keys, 0, (size + wide) * KEYS * sizeof(float));
    for (int64_t k = 0; k < count_keys; k++) {
      for (int64_t i = 0; i < size; i++) keys[i * KEYS + k] = to_float(key.at[i]);
      for (int64_t i = 0; i < size; i++) values[(i / COLUMNS * KEYS + k) * COLUMNS + i % COLUMNS] = to_float(value.at[i]);
      advance(b, u, b->keys, &key), advance(b, u, b->values, &value);
    }
    for (int64_t t = 0; t < tiles; t++) {
      int64_t row = t * rows / tiles, count = (t + 1) * rows / tiles - row;
      if (first >= first_seen + (row + count - 1) / group) continue;
      multiply(count, queries + row * size, 1, count, keys, size, scores);
      float shrink[MOST_ROWS];
      for (int64_t r = 0; r < count; r++) {
        float *score = scores + r * KEYS, most = largest[row + r], sum = 0;
        for (int64_t k = at_most(KEYS, first_seen + (row + r) / group - first) < 0 ? 0 : at_most(KEYS, first_seen + (row + r) / group - first); k < KEYS; k++) score[k] = -INFINITY;
        for (int64_t k = 0; k < KEYS; k++) most = score[k] > most ? score[k] : most;
        for (int64_t k = 0; k < KEYS; k++) score[k] = exponential(score[k] - most), sum += score[k];
        shrink[r] = exponential(largest[row + r] - most);
        total[row + r] = total[row + r] * shrink[r] + sum;
        largest[row + r] = most;
      }
      for (int64_t c = 0; c < wide; c += COLUMNS) {
        multiply(count, scores, KEYS, 1, values + c * KEYS, KEYS, part);
        for (int64_t r = 0; r < count; r++) {
          float *sum = sums + (row + r) * wide + c;
          for (int i = 0; i < COLUMNS; i++) sum[i] = sum[i] * shrink[r] + part[r * COLUMNS + i];
        }
      }
    }
  }
  for (int64_t r = 0; r < rows; r++) {
    value_t *result = to + r / group * b->kv_heads * group * size + r % group * size;
    for (int64_t i = 0; i < size; i++) result[i] = to_value(sums[r * wide + i] / total[r]);
  }
}

/* Attention of spans, each consecutive queries of one sequence that see the keys up to their own. rows, counts,
 * lengths: [spans], the row of a span's first query, how many it has, and how many keys the last of them sees. For the
 * other arguments see batch_t. Returns 0, or 1 if there is no memory to work in. */
int NAME(attend)(const value_t *queries, value_t *out, const value_t *keys, const value_t *values, const int64_t *rows,
                 const int64_t *counts, const int64_t *lengths, const int64_t *blocks, int64_t spans, int64_t width,
                 int64_t stride, int64_t kv_heads, int64_t group, int64_t size, int64_t in_block) {
  batch_t batch = {queries, out, keys, values, blocks, width, stride, kv_heads, group, size, in_block};
  int64_t longest = 0, most = 0, work = 0;
  for (int64_t s = 0; s < spans; s++) {
    longest = lengths[s] > longest ? lengths[s] : longest;
    most = counts[s] > most ? counts[s] : most;
    work += counts[s] * lengths[s];
  }
  int64_t pieces = (most + UNIT_QUERIES - 1) / UNIT_QUERIES, wide = rounded_up(size, COLUMNS);
  int64_t step_floats = STEP_ROWS * (wide + rounded_up(longest, LANES));
  int64_t chunk_floats = UNIT_QUERIES * group * (size + wide + 2) + (size + wide + 2 * MOST_ROWS) * KEYS;
  int failed = 0;
#pragma omp parallel if (work * kv_heads * size > PARALLEL_VALUES)
  {
    float *scratch = malloc((most > 1 && chunk_floats > step_floats ? chunk_floats : step_floats) * sizeof(float));
    if (!scratch) failed = 1;
#pragma omp for collapse(3) schedule(dynamic, 1)
    for (int64_t piece = 0; piece < pieces; piece++)
      for (int64_t s = 0; s < spans; s++)
        for (int64_t h = 0; h < kv_heads; h++) {
          int64_t first = piece * UNIT_QUERIES, count = at_most(UNIT_QUERIES, counts[s] - first);
          if (count <= 0 || !scratch) continue;
          unit_t unit = {blocks + s * width, h, rows[s] + first, count, lengths[s] - counts[s] + first + count};
          if (count == 1)
            attend_step(&batch, &unit, scratch);
          else
            attend_chunk(&batch, &unit, scratch);
        }
    free(scratch);
  }
  return failed;
}
