/* The steps of a decoder that PyTorch has no single operation for on a CPU. `cpu_kernels.py` compiles and calls them.
 *
 * Each is written once, for a type T of what lies in memory; all arithmetic is in float32. */

#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

typedef uint16_t bf16;

static inline float float_of_float(float value) { return value; }
static inline float float_of_bf16(bf16 value) {
  uint32_t bits = (uint32_t)value << 16;
  float result;
  memcpy(&result, &bits, 4);
  return result;
}
static inline float to_float(float value) { return value; }
static inline bf16 to_bf16(float value) { /* rounds to nearest, ties to even */
  uint32_t bits;
  memcpy(&bits, &value, 4);
  return (bf16)((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16);
}

/* e^x to one part in 10^7, as 2^n e^r with a polynomial for e^r (Cephes' expf); 0 or infinity beyond what a float
 * holds. The C library's would not be vectorised here. */
static inline float exponential(float x) {
  x = x < -88.0f ? -88.0f : x > 89.0f ? 89.0f : x;
  float n = rintf(x * 1.44269504f);
  float r = (x - n * 0.693359375f) + n * 2.12194440e-4f;
  float p = 1.9875691500e-4f;
  p = p * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * r * r + r + 1.0f;
  int32_t bits = ((int32_t)n + 127) << 23;
  float power;
  memcpy(&power, &bits, 4);
  return p * power;
}

/* Below this many values a second thread costs more than it saves. */
#define PARALLEL_VALUES 32768

#define KERNELS(T)                                                                                                     \
                                                                                                                       \
  /* out[r] = x[r] / sqrt(mean(x[r]^2) + eps) * weight, for each of `rows` rows of `size` values. */                   \
  void rms_norm_##T(const T *x, const T *weight, T *out, int64_t rows, int64_t size, float eps) {                      \
    _Pragma("omp parallel for if (rows * size > PARALLEL_VALUES)") for (int64_t r = 0; r < rows; r++) {                \
      const T *from = x + r * size;                                                                                    \
      T *to = out + r * size;                                                                                          \
      float sum = 0;                                                                                                   \
      for (int64_t i = 0; i < size; i++) sum += float_of_##T(from[i]) * float_of_##T(from[i]);                         \
      float scale = 1 / sqrtf(sum / size + eps);                                                                       \
      for (int64_t i = 0; i < size; i++) to[i] = to_##T(float_of_##T(from[i]) * scale * float_of_##T(weight[i]));      \
    }                                                                                                                  \
  }                                                                                                                    \
                                                                                                                       \
  /* out[r, i] = silu(x[r, i]) * x[r, size + i]: gate and up lie side by side. */                                      \
  void swiglu_##T(const T *x, T *out, int64_t rows, int64_t size) {                                                    \
    _Pragma("omp parallel for if (rows * size > PARALLEL_VALUES)") for (int64_t r = 0; r < rows; r++) {                \
      const T *gate = x + r * 2 * size, *up = gate + size;                                                             \
      for (int64_t i = 0; i < size; i++) {                                                                             \
        float g = float_of_##T(gate[i]);                                                                               \
        out[r * size + i] = to_##T(g / (1 + exponential(-g)) * float_of_##T(up[i]));                                   \
      }                                                                                                                \
    }                                                                                                                  \
  }                                                                                                                    \
                                                                                                                       \
  /* Turns the first `heads` of each token's `stride / size` heads in place: (a, b) -> (a cos - b sin, b cos + a sin), \
   * a and b the halves of a head; angles of its position: cos, sin [positions, size / 2]. */                          \
  void rotate_##T(T *x, const int64_t *positions, const float *cos, const float *sin, int64_t tokens, int64_t heads,   \
                  int64_t stride, int64_t size) {                                                                      \
    int64_t half = size / 2;                                                                                           \
    _Pragma("omp parallel for if (tokens * heads * size > PARALLEL_VALUES)") for (int64_t t = 0; t < tokens; t++) {    \
      const float *c = cos + positions[t] * half, *s = sin + positions[t] * half;                                      \
      for (int64_t h = 0; h < heads; h++) {                                                                            \
        T *restrict a = x + t * stride + h * size, *restrict b = a + half;                                             \
        for (int64_t i = 0; i < half; i++) {                                                                           \
          float first = float_of_##T(a[i]), second = float_of_##T(b[i]);                                               \
          a[i] = to_##T(first * c[i] - second * s[i]);                                                                 \
          b[i] = to_##T(second * c[i] + first * s[i]);                                                                 \
        }                                                                                                              \
      }                                                                                                                \
    }                                                                                                                  \
  }                                                                                                                    \
                                                                                                                       \
  /* keys_cache[rows[t]] = keys[t], and values likewise. A token's keys are `size` values in a row of `stride`. */     \
  void write_##T(const T *keys, const T *values, T *keys_cache, T *values_cache, const int64_t *rows, int64_t tokens,  \
                 int64_t stride, int64_t size) {                                                                       \
    for (int64_t t = 0; t < tokens; t++) {                                                                             \
      memcpy(keys_cache + rows[t] * size, keys + t * stride, size * sizeof(T));                                        \
      memcpy(values_cache + rows[t] * size, values + t * stride, size * sizeof(T));                                    \
    }                                                                                                                  \
  }                                                                                                                    \
                                                                                                                       \
  static inline __attribute__((always_inline)) void attend_head_##T(                                                   \
      const T *q, T *out, const T *keys, const T *values, const int64_t *blocks, int64_t length, int64_t kv_heads,     \
      int64_t group, int64_t size, int64_t in_block, float *scratch) {                                                 \
    float *scores = scratch, *query = scores + group * length, *sum = query + group * size;                            \
    float scale = 1 / sqrtf(size);                                                                                     \
    for (int64_t i = 0; i < group * size; i++) query[i] = float_of_##T(q[i]) * scale, sum[i] = 0;                      \
    for (int64_t first = 0; first < length; first += in_block) {                                                       \
      const T *key = keys + blocks[first / in_block] * in_block * kv_heads * size;                                     \
      int64_t last = first + in_block < length ? first + in_block : length;                                            \
      for (int64_t g = 0; g < group; g++) {                                                                            \
        const float *restrict from = query + g * size;                                                                 \
        int64_t n = first;                                                                                             \
        for (; n + 4 <= last; n += 4) { /* four sums at once, for each waits on its own additions */                   \
          const T *restrict k = key + (n - first) * kv_heads * size;                                                   \
          const T *restrict k1 = k + kv_heads * size, *restrict k2 = k1 + kv_heads * size;                             \
          const T *restrict k3 = k2 + kv_heads * size;                                                                 \
          float dot = 0, dot1 = 0, dot2 = 0, dot3 = 0;                                                                 \
          for (int64_t i = 0; i < size; i++) {                                                                         \
            dot += from[i] * float_of_##T(k[i]), dot1 += from[i] * float_of_##T(k1[i]);                                \
            dot2 += from[i] * float_of_##T(k2[i]), dot3 += from[i] * float_of_##T(k3[i]);                              \
          }                                                                                                            \
          float *to = scores + g * length + n;                                                                         \
          to[0] = dot, to[1] = dot1, to[2] = dot2, to[3] = dot3;                                                       \
        }                                                                                                              \
        for (; n < last; n++) {                                                                                        \
          const T *restrict k = key + (n - first) * kv_heads * size;                                                   \
          float dot = 0;                                                                                               \
          for (int64_t i = 0; i < size; i++) dot += from[i] * float_of_##T(k[i]);                                      \
          scores[g * length + n] = dot;                                                                                \
        }                                                                                                              \
      }                                                                                                                \
    }                                                                                                                  \
    for (int64_t g = 0; g < group; g++) {                                                                              \
      float *row = scores + g * length, largest = row[0], total = 0;                                                   \
      for (int64_t n = 1; n < length; n++) largest = row[n] > largest ? row[n] : largest;                              \
      for (int64_t n = 0; n < length; n++) row[n] = exponential(row[n] - largest), total += row[n];                    \
      for (int64_t n = 0; n < length; n++) row[n] /= total;                                                            \
    }                                                                                                                  \
    for (int64_t first = 0; first < length; first += in_block) {                                                       \
      const T *value = values + blocks[first / in_block] * in_block * kv_heads * size;                                 \
      int64_t last = first + in_block < length ? first + in_block : length;                                            \
      for (int64_t g = 0; g < group; g++) {                                                                            \
        float part[size]; /* stays in registers, which a sum in memory would not */                                    \
        for (int64_t i = 0; i < size; i++) part[i] = sum[g * size + i];                                                \
        for (int64_t n = first; n < last; n++) {                                                                       \
          const T *restrict v = value + (n - first) * kv_heads * size;                                                 \
          float weight = scores[g * length + n];                                                                       \
          for (int64_t i = 0; i < size; i++) part[i] += weight * float_of_##T(v[i]);                                   \
        }                                                                                                              \
        for (int64_t i = 0; i < size; i++) sum[g * size + i] = part[i];                                                \
      }                                                                                                                \
    }                                                                                                                  \
    for (int64_t i = 0; i < group * size; i++) out[i] = to_##T(sum[i]);                                                \
  }                                                                                                                    \
                                                                                                                       \
  /* Paged attention of one query a span. queries: rows of `stride` values; out: rows of heads * size. rows: [spans],  \
   * the row of each span's query and of its result. blocks: [spans, width]; keys, values: [blocks, in_block, KV       \
   * heads, size]. lengths: [spans], how many keys are seen. `group` heads share a KV head. Returns 0, or 1 if there   \
   * is no memory for the scores. */                                                                                   \
  int attend_##T(const T *queries, T *out, const T *keys, const T *values, const int64_t *rows, const int64_t *blocks, \
                 const int64_t *lengths, int64_t spans, int64_t width, int64_t stride, int64_t kv_heads,               \
                 int64_t group, int64_t size, int64_t in_block) {                                                      \
    int64_t longest = 0;                                                                                               \
    for (int64_t s = 0; s < spans; s++) longest = lengths[s] > longest ? lengths[s] : longest;                         \
    int failed = 0;                                                                                                    \
    _Pragma("omp parallel if (spans * longest * kv_heads * size > PARALLEL_VALUES)") {                                 \
      float *scratch = malloc(group * (longest + 2 * size) * sizeof(float));                                           \
      _Pragma("omp for collapse(2) schedule(dynamic, 1)") for (int64_t s = 0; s < spans; s++)                          \
        for (int64_t h = 0; h < kv_heads; h++) {                                                                       \
          const T *q = queries + rows[s] * stride + h * group * size;                                                  \
          T *to = out + (rows[s] * kv_heads + h) * group * size;                                                       \
          const T *k = keys + h * size, *v = values + h * size;                                                        \
          const int64_t *own = blocks + s * width;                                                                     \
          if (!scratch) {                                                                                              \
            failed = 1;                                                                                                \
            continue;                                                                                                  \
          }                                                                                                            \
          switch (size) { /* the common sizes as constants, for loops without a remainder */                           \
            case 32: attend_head_##T(q, to, k, v, own, lengths[s], kv_heads, group, 32, in_block, scratch); break;     \
            case 64: attend_head_##T(q, to, k, v, own, lengths[s], kv_heads, group, 64, in_block, scratch); break;     \
            case 128: attend_head_##T(q, to, k, v, own, lengths[s], kv_heads, group, 128, in_block, scratch); break;   \
            default: attend_head_##T(q, to, k, v, own, lengths[s], kv_heads, group, size, in_block, scratch);          \
          }                                                                                                            \
        }                                                                                                              \
      free(scratch);                                                                                                   \
    }                                                                                                                  \
    return failed;                                                                                                     \
  }

KERNELS(float)
KERNELS(bf16)
