/* Attention of a unit with one query. It is bound by reading keys and values, which are used without repacking, LANES
 * at a time: while LANES of them are processed for all heads, the next are prefetched. */

#ifndef IFBBENCH_ATTENTION_STEP_H
#define IFBBENCH_ATTENTION_STEP_H

#include "attention_unit.h"
#include "exponential.h"

/* Query heads that are processed together. */
#define STEP_ROWS 4
/* Vectors of a value that are summed in registers, for each of these heads. */
#define STEP_VECTORS (LANES == 16 ? 4 : 2)

/* queries, sums: [rows, wide], a row being a query head of the unit. scores: [rows, longest], then weights. */
typedef struct {
  float *queries, *sums, *scores;
  int64_t rows, wide, longest;
} step_t;

static int64_t step_scratch_floats(int64_t heads, int64_t group, int64_t size, int64_t length) {
  return heads * group * (2 * rounded_up(size, LANES) + rounded_up(length, LANES));
}

static step_t step_in(const batch_t *b, const unit_t *u, float *scratch) {
  step_t s = {.rows = u->heads * b->group, .wide = rounded_up(b->size, LANES), .longest = rounded_up(u->length, LANES)};
  s.queries = scratch;
  s.sums = s.queries + s.rows * s.wide;
  s.scores = s.sums + s.rows * s.wide;
  return s;
}

/* Addresses of the next LANES keys, or values, of the unit's first head; the last one repeats. */
INLINE void locate(cursor_t *cursor, const value_t *at[LANES]) {
  for (int k = 0; k < LANES; k++) at[k] = cursor->at, advance(cursor);
}

INLINE void fetch(const value_t *from, int64_t size) {
  for (int64_t i = 0; i < size; i += CACHE_LINE / (int64_t)sizeof(value_t)) __builtin_prefetch(from + i);
}

/* LANES of `size` values from index `i` on, as floats. */
INLINE vector load_part(const value_t *from, int64_t i, int64_t size) {
  return size - i < LANES ? load_some_values(from + i, size - i) : load_values(from + i);
}

/* scores[rows, s->longest], LANES of each row: queries[rows, s->wide] times the keys at `at` + `offset`. */
INLINE void score_keys(const step_t *s, int rows, int64_t size, const float *queries, const value_t *at[LANES],
                       const value_t *next[LANES], int64_t offset, float *scores) {
  vector products[STEP_ROWS][LANES];
  for (int k = 0; k < LANES; k++) {
    vector product[STEP_ROWS] = {0};
    fetch(next[k] + offset, size);
    for (int64_t i = 0; i < size; i += LANES) {
      vector part = load_part(at[k] + offset, i, size);
#pragma GCC unroll 4
      for (int r = 0; r < rows; r++) product[r] += part * load_vector(queries + r * s->wide + i);
    }
#pragma GCC unroll 4
    for (int r = 0; r < rows; r++) products[r][k] = product[r];
  }
#pragma GCC unroll 4
  for (int r = 0; r < rows; r++) store_vector(scores + r * s->longest, sums_of(products[r]));
}

/* sums[rows, s->wide] += weights[rows, s->longest], the first `count` of each row, times the values at `at` + `offset`;
 * `vectors` vectors of each value at a time. */
INLINE void sum_values(const step_t *s, int rows, int64_t size, int vectors, const float *weights, int64_t count,
                       const value_t *at[LANES], const value_t *next[LANES], int64_t offset, float *sums) {
  for (int k = 0; k < LANES; k++) fetch(next[k] + offset, size);
  for (int64_t first = 0; first < size; first += vectors * LANES) {
    vector sum[STEP_ROWS][STEP_VECTORS];
#pragma GCC unroll 4
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 4
      for (int v = 0; v < vectors; v++) sum[r][v] = load_vector(sums + r * s->wide + first + v * LANES);
    for (int64_t k = 0; k < count; k++)
#pragma GCC unroll 4
      for (int v = 0; v < vectors; v++) {
        vector part = load_part(at[k] + offset, first + v * LANES, size);
#pragma GCC unroll 4
        for (int r = 0; r < rows; r++) sum[r][v] += weights[r * s->longest + k] * part;
      }
#pragma GCC unroll 4
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 4
      for (int v = 0; v < vectors; v++) store_vector(sums + r * s->wide + first + v * LANES, sum[r][v]);
  }
}

/* Softmax of the first `count` scores. They are padded to a multiple of LANES with copies of the last one. */
static void softmax(float *scores, int64_t count) {
  float largest = largest_of(scores, count, scores[0]), total = 0;
  for (int64_t n = 0; n < count; n++) scores[n] = exponential(scores[n] - largest), total += scores[n];
  for (int64_t n = 0; n < count; n++) scores[n] /= total;
}

/* The next three functions process the `rows` query heads from `row` on of each KV head. `rows` and, for common sizes,
 * `size` are constants where they are inlined. */

/* Scores of all keys. */
INLINE void score_all(const batch_t *b, const unit_t *u, const step_t *s, int rows, int64_t size, int64_t row) {
  const value_t *places[2][LANES];
  cursor_t key = first_of(b, u, b->keys);
  locate(&key, places[0]);
  for (int64_t first = 0, turn = 0; first < u->length; first += LANES, turn ^= 1) {
    locate(&key, places[turn ^ 1]);
    for (int64_t head = 0, r = row; head < u->heads; head++, r += b->group)
      score_keys(s, rows, size, s->queries + r * s->wide, places[turn], places[turn ^ 1], head * size,
                 s->scores + r * s->longest + first);
  }
}

/* Weighted sums of all values. */
INLINE void sum_all(const batch_t *b, const unit_t *u, const step_t *s, int rows, int64_t size, int vectors,
                    int64_t row) {
  const value_t *places[2][LANES];
  cursor_t value = first_of(b, u, b->values);
  locate(&value, places[0]);
  for (int64_t first = 0, turn = 0; first < u->length; first += LANES, turn ^= 1) {
    locate(&value, places[turn ^ 1]);
    for (int64_t head = 0, r = row; head < u->heads; head++, r += b->group)
      sum_values(s, rows, size, vectors, s->scores + r * s->longest + first, at_most(LANES, u->length - first),
                 places[turn], places[turn ^ 1], head * size, s->sums + r * s->wide);
  }
}

INLINE void attend_heads(const batch_t *b, const unit_t *u, const step_t *s, int rows, int64_t size, int vectors,
                         int64_t row) {
  score_all(b, u, s, rows, size, row);
  for (int64_t head = 0; head < u->heads; head++)
    for (int r = 0; r < rows; r++) softmax(s->scores + (head * b->group + row + r) * s->longest, u->length);
  sum_all(b, u, s, rows, size, vectors, row);
}

/* Common sizes are constants, so that loops have no remainder. */
#define ATTEND_HEADS(rows)                                                         \
  switch (b->size) {                                                               \
    case 32: attend_heads(b, u, &s, rows, 32, 2, first); break;                    \
    case 64: attend_heads(b, u, &s, rows, 64, STEP_VECTORS, first); break;         \
    case 128: attend_heads(b, u, &s, rows, 128, STEP_VECTORS, first); break;       \
    default: attend_heads(b, u, &s, rows, b->size, 1, first);                      \
  }

/* scratch: of `step_scratch_floats` floats. */
static void attend_step(const batch_t *b, const unit_t *u, float *scratch) {
  step_t s = step_in(b, u, scratch);
  float scale = 1 / sqrtf(b->size);
  memset(s.queries, 0, 2 * s.rows * s.wide * sizeof(float));
  for (int64_t r = 0; r < s.rows; r++) {
    const value_t *query = queries_of(b, u) + r * b->size;
    for (int64_t i = 0; i < b->size; i++) s.queries[r * s.wide + i] = to_float(query[i]) * scale;
  }
  for (int64_t first = 0; first < b->group; first += STEP_ROWS) {
    switch (b->group - first) {
      case 1: ATTEND_HEADS(1); break;
      case 2: ATTEND_HEADS(2); break;
      case 3: ATTEND_HEADS(3); break;
      default: ATTEND_HEADS(4);
    }
  }
  for (int64_t r = 0; r < s.rows; r++) {
    value_t *to = results_of(b, u) + r * b->size;
    for (int64_t i = 0; i < b->size; i++) to[i] = to_value(s.sums[r * s.wide + i]);
  }
}

#endif
