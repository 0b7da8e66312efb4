/* Units of work of paged attention: some queries of a sequence in some heads. */

#ifndef IFBBENCH_ATTENTION_UNIT_H
#define IFBBENCH_ATTENTION_UNIT_H

#include "vectors.h"

/* queries: rows of `stride` values, [kv_heads, group, size] of each token; out: rows of [kv_heads, group, size]. keys,
 * values: [blocks, in_block, kv_heads, size]. `group` query heads share a KV head. */
typedef struct {
  const value_t *queries;
  value_t *out;
  const value_t *keys, *values;
  int64_t stride, kv_heads, group, size, in_block;
} batch_t;

/* Rows [row, row + count) of the batch in the KV heads [head, head + heads). The last row sees `length` keys, each
 * other row one key fewer than the next. blocks: ids of the sequence's blocks. */
typedef struct {
  const int64_t *blocks;
  int64_t head, heads, row, count, length;
} unit_t;

INLINE const value_t *queries_of(const batch_t *b, const unit_t *u) {
  return b->queries + u->row * b->stride + u->head * b->group * b->size;
}

INLINE value_t *results_of(const batch_t *b, const unit_t *u) {
  return b->out + (u->row * b->kv_heads + u->head) * b->group * b->size;
}

/* Iterates over the keys, or values, of a unit's first head. */
typedef struct {
  const batch_t *batch;
  const unit_t *unit;
  const value_t *cache, *at;
  const int64_t *block;
  int64_t left_in_block, left;
} cursor_t;

INLINE void enter_block(cursor_t *cursor) {
  const batch_t *b = cursor->batch;
  cursor->at = cursor->cache + (*cursor->block * b->in_block * b->kv_heads + cursor->unit->head) * b->size;
  cursor->left_in_block = b->in_block;
}

/* A cursor at the first of a unit's keys, or values. cache: the keys, or values, of all blocks. */
INLINE cursor_t first_of(const batch_t *b, const unit_t *u, const value_t *cache) {
  cursor_t cursor = {b, u, cache, NULL, u->blocks, 0, u->length};
  enter_block(&cursor);
  return cursor;
}

/* Move to the next one; stay at the last. */
INLINE void advance(cursor_t *cursor) {
  if (--cursor->left <= 0) return;
  cursor->at += cursor->batch->kv_heads * cursor->batch->size;
  if (--cursor->left_in_block) return;
  cursor->block++;
  enter_block(cursor);
}

#endif
