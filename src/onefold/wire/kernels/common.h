/*
 * What the kernels share: bf16, and the instruction sets they are compiled for.
 *
 * Results have the same bits with whichever instruction set: only correctly rounded operations,
 * in the order that is written. So compile without -ffast-math and with -ffp-contract=off.
 */
#ifndef ONEFOLD_COMMON_H
#define ONEFOLD_COMMON_H

#include <stdint.h>

#define INLINED static inline __attribute__((always_inline))

union bits {
    uint32_t whole;
    float value;
};

INLINED float widened(uint16_t narrow)
{
    union bits wide = {.whole = (uint32_t)narrow << 16};
    return wide.value;
}

/* To the nearest bf16, ties to even; NaN stays NaN, where rounding might carry it to infinity. */
INLINED uint16_t rounded(float value)
{
    union bits wide = {.value = value};
    uint32_t nearest = (wide.whole + 0x7fff + ((wide.whole >> 16) & 1)) >> 16;
    return value == value ? (uint16_t)nearest : 0x7fc0;
}

#if defined(__x86_64__)
#if defined(__clang__)
#define AVX512 __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,fma")))
#else
#define AVX512 \
    __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,fma,prefer-vector-width=512")))
#endif
#define AVX2 __attribute__((target("avx2,fma")))
#define HAS_AVX512                                                              \
    (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw")    \
     && __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl"))
#define HAS_AVX2 (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma"))
#endif

#endif
