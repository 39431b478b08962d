/* AdamW over host arenas, one call per thread and slice: reads gradient, master and moments once, writes them once.
 *
 * The master is FP32, or split into a bfloat16 high half and an int16 low half (see master_weights.py):
 *     bits = (high << 16) + low        high = (bits + 0x8000) >> 16        low = bits - (high << 16)
 * The gradient is bfloat16 or FP32. The update is that of torch.optim.AdamW:
 *     p *= 1 - lr * weight_decay;  m += (g - m) * (1 - beta1);  v = v * beta2 + (1 - beta2) * g * g
 *     p -= lr / (1 - beta1^t) * m / (sqrt(v) / sqrt(1 - beta2^t) + eps)
 *
 * With AVX-512, results that go to other arenas than they come from are written around the cache: a plain store would
 * first read what it overwrites, which costs half as much again.
 *
 * One body serves three instruction sets through the small vector vocabulary below; `adamw_update` picks the widest
 * that the processor has.
 */
#include <immintrin.h>
#include <math.h>
#include <stdint.h>
#include <string.h>

typedef struct {
    float one_minus_lr_decay; /* 1 - lr * weight_decay */
    float one_minus_beta1;
    float beta2;
    float one_minus_beta2;
    float step_size;      /* lr / (1 - beta1^t) */
    float inv_sqrt_bias2; /* 1 / sqrt(1 - beta2^t) */
    float eps;
    float grad_scale;
} Settings;

/* Where the state is: `master` FP32, or NULL with `high` and `low`. Moments always FP32. */
typedef struct {
    float *master;
    uint16_t *high;
    int16_t *low;
    float *m;
    float *v;
} Arenas;

static inline float as_float(uint32_t bits) {
    float value;
    memcpy(&value, &bits, 4);
    return value;
}

static inline uint32_t as_bits(float value) {
    uint32_t bits;
    memcpy(&bits, &value, 4);
    return bits;
}

/* Whether every vector of the arenas that are written begins where a store around the cache may write. */
static int is_aligned(const Arenas *out) {
    uintptr_t all = (uintptr_t)out->m | (uintptr_t)out->v | (uintptr_t)out->master;
    return all % 64 == 0 && ((uintptr_t)out->high | (uintptr_t)out->low) % 32 == 0;
}

/* Elements [from, to), one at a time: the plain path, and the remainder of the vector paths. */
static void update_plain(const Settings *s, int64_t from, int64_t to, const Arenas *in, const Arenas *out,
                         const void *grad, int grad_is_bf16) {
    for (int64_t i = from; i < to; i++) {
        float g = grad_is_bf16 ? as_float((uint32_t)((const uint16_t *)grad)[i] << 16) : ((const float *)grad)[i];
        float p = in->master ? in->master[i] : as_float(((uint32_t)in->high[i] << 16) + (uint32_t)(int32_t)in->low[i]);
        g *= s->grad_scale;
        p *= s->one_minus_lr_decay;
        float first = in->m[i] + (g - in->m[i]) * s->one_minus_beta1;
        float second = in->v[i] * s->beta2 + s->one_minus_beta2 * g * g;
        p -= s->step_size * first / (sqrtf(second) * s->inv_sqrt_bias2 + s->eps);
        out->m[i] = first;
        out->v[i] = second;
        if (in->master) {
            out->master[i] = p;
        } else {
            uint32_t bits = as_bits(p), rounded = (bits + 0x8000u) >> 16;
            out->high[i] = (uint16_t)rounded;
            out->low[i] = (int16_t)(bits - (rounded << 16));
        }
    }
}

__attribute__((target("avx512f,avx512bw,avx512vl"))) static void
update_avx512(const Settings *s, int64_t n, const Arenas *in, const Arenas *out, const void *grad,
              int grad_is_bf16) {
    const __m512 decay = _mm512_set1_ps(s->one_minus_lr_decay), one_minus_beta1 = _mm512_set1_ps(s->one_minus_beta1);
    const __m512 beta2 = _mm512_set1_ps(s->beta2), one_minus_beta2 = _mm512_set1_ps(s->one_minus_beta2);
    const __m512 step_size = _mm512_set1_ps(s->step_size), inv_bias2 = _mm512_set1_ps(s->inv_sqrt_bias2);
    const __m512 eps = _mm512_set1_ps(s->eps), scale = _mm512_set1_ps(s->grad_scale);
    const __m512i half = _mm512_set1_epi32(0x8000);
    const int around_cache = in->m != out->m && is_aligned(out);
    int64_t i = 0;
    for (; i + 16 <= n; i += 16) {
        __m512 g, p;
        if (grad_is_bf16) {
            __m256i raw = _mm256_loadu_si256((const __m256i *)((const uint16_t *)grad + i));
            g = _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(raw), 16));
        } else {
            g = _mm512_loadu_ps((const float *)grad + i);
        }
        if (in->master) {
            p = _mm512_loadu_ps(in->master + i);
        } else {
            __m512i upper = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)(in->high + i)));
            __m512i lower = _mm512_cvtepi16_epi32(_mm256_loadu_si256((const __m256i *)(in->low + i)));
            p = _mm512_castsi512_ps(_mm512_add_epi32(_mm512_slli_epi32(upper, 16), lower));
        }
        g = _mm512_mul_ps(g, scale);
        p = _mm512_mul_ps(p, decay);
        __m512 first = _mm512_loadu_ps(in->m + i), second = _mm512_loadu_ps(in->v + i);
        first = _mm512_fmadd_ps(_mm512_sub_ps(g, first), one_minus_beta1, first);
        second = _mm512_fmadd_ps(_mm512_mul_ps(one_minus_beta2, g), g, _mm512_mul_ps(second, beta2));
        __m512 denominator = _mm512_fmadd_ps(_mm512_sqrt_ps(second), inv_bias2, eps);
        p = _mm512_fnmadd_ps(step_size, _mm512_div_ps(first, denominator), p);
        __m512i bits = _mm512_castps_si512(p);
        __m512i rounded = _mm512_srli_epi32(_mm512_add_epi32(bits, half), 16);
        __m256i upper = _mm512_cvtepi32_epi16(rounded);
        __m256i lower = _mm512_cvtepi32_epi16(_mm512_sub_epi32(bits, _mm512_slli_epi32(rounded, 16)));
        if (around_cache) {
            _mm512_stream_ps(out->m + i, first);
            _mm512_stream_ps(out->v + i, second);
            if (in->master) {
                _mm512_stream_ps(out->master + i, p);
            } else {
                _mm256_stream_si256((__m256i *)(out->high + i), upper);
                _mm256_stream_si256((__m256i *)(out->low + i), lower);
            }
            continue;
        }
        _mm512_storeu_ps(out->m + i, first);
        _mm512_storeu_ps(out->v + i, second);
        if (in->master) {
            _mm512_storeu_ps(out->master + i, p);
        } else {
            _mm256_storeu_si256((__m256i *)(out->high + i), upper);
            _mm256_storeu_si256((__m256i *)(out->low + i), lower);
        }
    }
    _mm_sfence();
    update_plain(s, i, n, in, out, grad, grad_is_bf16);
}

__attribute__((target("avx2,fma"))) static void
update_avx2(const Settings *s, int64_t n, const Arenas *in, const Arenas *out, const void *grad,
            int grad_is_bf16) {
    const __m256 decay = _mm256_set1_ps(s->one_minus_lr_decay), one_minus_beta1 = _mm256_set1_ps(s->one_minus_beta1);
    const __m256 beta2 = _mm256_set1_ps(s->beta2), one_minus_beta2 = _mm256_set1_ps(s->one_minus_beta2);
    const __m256 step_size = _mm256_set1_ps(s->step_size), inv_bias2 = _mm256_set1_ps(s->inv_sqrt_bias2);
    const __m256 eps = _mm256_set1_ps(s->eps), scale = _mm256_set1_ps(s->grad_scale);
    const __m256i half = _mm256_set1_epi32(0x8000);
    int64_t i = 0;
    for (; i + 8 <= n; i += 8) {
        __m256 g, p;
        if (grad_is_bf16) {
            __m128i raw = _mm_loadu_si128((const __m128i *)((const uint16_t *)grad + i));
            g = _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(raw), 16));
        } else {
            g = _mm256_loadu_ps((const float *)grad + i);
        }
        if (in->master) {
            p = _mm256_loadu_ps(in->master + i);
        } else {
            __m256i upper = _mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)(in->high + i)));
            __m256i lower = _mm256_cvtepi16_epi32(_mm_loadu_si128((const __m128i *)(in->low + i)));
            p = _mm256_castsi256_ps(_mm256_add_epi32(_mm256_slli_epi32(upper, 16), lower));
        }
        g = _mm256_mul_ps(g, scale);
        p = _mm256_mul_ps(p, decay);
        __m256 first = _mm256_loadu_ps(in->m + i), second = _mm256_loadu_ps(in->v + i);
        first = _mm256_fmadd_ps(_mm256_sub_ps(g, first), one_minus_beta1, first);
        second = _mm256_fmadd_ps(_mm256_mul_ps(one_minus_beta2, g), g, _mm256_mul_ps(second, beta2));
        __m256 denominator = _mm256_fmadd_ps(_mm256_sqrt_ps(second), inv_bias2, eps);
        p = _mm256_fnmadd_ps(step_size, _mm256_div_ps(first, denominator), p);
        _mm256_storeu_ps(out->m + i, first);
        _mm256_storeu_ps(out->v + i, second);
        if (in->master) {
            _mm256_storeu_ps(out->master + i, p);
        } else {
            __m256i bits = _mm256_castps_si256(p);
            __m256i rounded = _mm256_srli_epi32(_mm256_add_epi32(bits, half), 16);
            __m256i rest = _mm256_sub_epi32(bits, _mm256_slli_epi32(rounded, 16));
            /* pack works within 128-bit lanes; the permutation puts the four quarters of both halves in order */
            __m256i upper = _mm256_permute4x64_epi64(_mm256_packus_epi32(rounded, rounded), 0x08);
            __m256i lower = _mm256_permute4x64_epi64(_mm256_packs_epi32(rest, rest), 0x08);
            _mm_storeu_si128((__m128i *)(out->high + i), _mm256_castsi256_si128(upper));
            _mm_storeu_si128((__m128i *)(out->low + i), _mm256_castsi256_si128(lower));
        }
    }
    update_plain(s, i, n, in, out, grad, grad_is_bf16);
}

/* 2: AVX-512, 1: AVX2 with FMA, 0: plain. */
int adamw_best_level(void) {
    __builtin_cpu_init();
    if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl"))
        return 2;
    return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") ? 1 : 0;
}

/* n elements, from `in` to `out`, which may be the same. */
void adamw_update(int level, const Settings *s, int64_t n, const Arenas *in, const Arenas *out, const void *grad,
                  int grad_is_bf16) {
    if (level == 2)
        update_avx512(s, n, in, out, grad, grad_is_bf16);
    else if (level == 1)
        update_avx2(s, n, in, out, grad, grad_is_bf16);
    else
        update_plain(s, 0, n, in, out, grad, grad_is_bf16);
}
