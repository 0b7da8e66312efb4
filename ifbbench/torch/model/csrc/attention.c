/* Paged attention of a mixed batch, which reads keys and values in the cache without a copy. */

#include <omp.h>
#include <stdlib.h>

#include "attention_chunk.h"
#include "attention_step.h"

/* Units per thread: enough to balance units of different duration. */
#define UNITS_PER_THREAD 4

/* KV heads of a single query per unit: all, because they are adjacent in memory, unless threads would be idle. */
static int64_t heads_of_a_step(int64_t spans, int64_t kv_heads) {
  int64_t heads = kv_heads;
  while (heads > 1 && spans * (kv_heads / heads) < UNITS_PER_THREAD * omp_get_max_threads()) heads = (heads + 1) / 2;
  return heads;
}

/* Causal attention of spans of consecutive queries of one sequence each. rows, counts, lengths: [spans], row of the
 * first query, number of queries, and number of keys that the last query sees. blocks: [spans, width]. The other
 * arguments are those of batch_t. Returns 0, or 1 if there is not enough memory for scratch space. */
int NAME(attend)(const value_t *queries, value_t *out, const value_t *keys, const value_t *values, const int64_t *rows,
                 const int64_t *counts, const int64_t *lengths, const int64_t *blocks, int64_t spans, int64_t width,
                 int64_t stride, int64_t kv_heads, int64_t group, int64_t size, int64_t in_block) {
  batch_t batch = {queries, out, keys, values, stride, kv_heads, group, size, in_block};
  int64_t longest = 0, max_queries = 0, pairs = 0;
  for (int64_t s = 0; s < spans; s++) {
    longest = at_least(longest, lengths[s]);
    max_queries = at_least(max_queries, counts[s]);
    pairs += counts[s] * lengths[s];
  }
  int64_t pieces = parts_of(max_queries, CHUNK_QUERIES);
  int64_t step_heads = heads_of_a_step(spans, kv_heads), floats = step_scratch_floats(step_heads, group, size, longest);
  if (max_queries > 1) floats = at_least(floats, chunk_scratch_floats(size, group));
  int failed = 0;
#pragma omp parallel if (pairs * kv_heads * size > PARALLEL_VALUES)
  {
    float *scratch = malloc(floats * sizeof(float));
    if (!scratch) failed = 1;
#pragma omp for collapse(3) schedule(dynamic, 1)
    for (int64_t piece = 0; piece < pieces; piece++)
      for (int64_t s = 0; s < spans; s++)
        for (int64_t head = 0; head < kv_heads; head++) {
          int64_t first = piece * CHUNK_QUERIES, count = at_most(CHUNK_QUERIES, counts[s] - first);
          if (count <= 0 || !scratch || (count == 1 && head % step_heads)) continue;
          int64_t heads = count == 1 ? at_most(step_heads, kv_heads - head) : 1;
          int64_t length = lengths[s] - counts[s] + first + count;
          unit_t unit = {blocks + s * width, head, heads, rows[s] + first, count, length};
          if (count == 1)
            attend_step(&batch, &unit, scratch);
          else
            attend_chunk(&batch, &unit, scratch);
        }
    free(scratch);
  }
  return failed;
}
