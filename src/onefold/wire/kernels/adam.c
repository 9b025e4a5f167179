/*
 * AdamW and Adam for bf16 weights in one pass over flat tensors: widen the gradient, step the fp32 master and its
 * two moments in place, round the weight. Separate kernels for these touch each cache line three
 * times and cannot hide a conversion behind the next line's loads; here arithmetic and memory
 * overlap, 28 bytes an element (Adam: arXiv 1412.6980, algorithm 1; AdamW: arXiv 1711.05101,
 * algorithm 2).
 *
 * Every element has the same bits wherever a tensor is cut, on however many threads, and with
 * whichever instruction set: all of them compute the correctly rounded +, -, *, /, sqrt and the
 * fma that are written below, in that order. So compile without -ffast-math, with
 * -ffp-contract=off (no fma but these) and -fno-math-errno (or sqrt is not vectorised). The order
 * is that of torch's fused kernel on x86, so are the bits.
 */
#include <math.h>
#include <pthread.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "common.h"

/* What a step has for all elements alike; every number was rounded from double once. */
struct adam_step {
    float shrink;     /* 1 - lr * weight_decay (AdamW), else 1 */
    float decay;      /* weight_decay, added to the gradient (Adam), else 0 */
    float sign;       /* -1 to maximize, else 1 */
    float mean_rate;  /* 1 - beta1 */
    float square_keep, square_rate; /* beta2 and 1 - beta2 */
    float square_bias;              /* sqrt(1 - beta2^step) */
    float eps;
    float rate;       /* -lr / (1 - beta1^step) */
};

/* Tensors of `numel` elements that do not overlap. */
struct adam_flats {
    int64_t numel;
    float *param, *exp_avg, *exp_avg_sq; /* stepped in place */
    const void *grad;                    /* bf16 if `grad_is_bf16`, else fp32 */
    uint16_t *weight;                    /* bf16, gets `param` rounded */
    int32_t grad_is_bf16;
};

/* The loop that the compiler vectorises; the flags are constants where it is inlined. */
INLINED void step_elements(
    const struct adam_step s, const struct adam_flats *flats,
    bool grad_is_bf16, bool is_coupled)
{
    float *param = flats->param, *mean = flats->exp_avg, *square = flats->exp_avg_sq;
    const float *wide_grad = flats->grad;
    const uint16_t *narrow_grad = flats->grad;
    uint16_t *weight = flats->weight;
    for (int64_t i = 0; i < flats->numel; i++) {
        float p = param[i], m = mean[i], v = square[i];
        float g = s.sign * (grad_is_bf16 ? widened(narrow_grad[i]) : wide_grad[i]);
        if (is_coupled)
            g = __builtin_fmaf(p, s.decay, g);
        p *= s.shrink;
        m = __builtin_fmaf(s.mean_rate, g - m, m);
        v = __builtin_fmaf(s.square_rate * g, g, v * s.square_keep);
        p += s.rate * m / (sqrtf(v) / s.square_bias + s.eps);
        param[i] = p;
        mean[i] = m;
        square[i] = v;
        weight[i] = rounded(p);
    }
}

/* One loop for each kind of tensors. Coupled decay of 0 is none: 0 * inf would be NaN. */
INLINED void step_flats(
    const struct adam_step *s, const struct adam_flats *flats)
{
    bool is_coupled = s->decay != 0;
    if (flats->grad_is_bf16 && !is_coupled)
        step_elements(*s, flats, true, false);
    else if (flats->grad_is_bf16)
        step_elements(*s, flats, true, true);
    else if (!is_coupled)
        step_elements(*s, flats, false, false);
    else
        step_elements(*s, flats, false, true);
}

/* The same code once for each instruction set that has an fma; without one, torch is faster. */
typedef void kernel(const struct adam_step *, const struct adam_flats *);

#define DEFINE_KERNEL(name, attributes)                                              \
    attributes static void name(const struct adam_step *s, const struct adam_flats *f) \
    {                                                                                \
        step_flats(s, f);                                                            \
    }

#if defined(__x86_64__)
DEFINE_KERNEL(step_avx512, AVX512)
DEFINE_KERNEL(step_avx2, AVX2)
#elif defined(__aarch64__) || defined(__FP_FAST_FMAF)
DEFINE_KERNEL(step_baseline, )
#endif

/* The kernels that this CPU runs, the fastest first: `names` and `kernels` of at least 2. */
static int find_kernels(const char **names, kernel **kernels)
{
    int count = 0;
#if defined(__x86_64__)
    if (HAS_AVX512)
        names[count] = "AVX-512", kernels[count++] = step_avx512;
    if (HAS_AVX2)
        names[count] = "AVX2", kernels[count++] = step_avx2;
#elif defined(__aarch64__) || defined(__FP_FAST_FMAF)
    names[count] = "baseline", kernels[count++] = step_baseline;
#endif
    return count;
}

/* The name of a kernel that this CPU runs, counted from the fastest; NULL after the last. */
const char *onefold_adam_name(int index)
{
    const char *names[2];
    kernel *kernels[2];
    return index < find_kernels(names, kernels) ? names[index] : NULL;
}

struct share {
    kernel *run;
    const struct adam_step *step;
    struct adam_flats flats;
};

static void *run_share(void *argument)
{
    struct share *share = argument;
    share->run(share->step, &share->flats);
    return NULL;
}

static struct adam_flats cut(const struct adam_flats *whole, int64_t start, int64_t stop)
{
    struct adam_flats part = *whole;
    part.numel = stop - start;
    part.param += start, part.weight += start;
    part.exp_avg += start, part.exp_avg_sq += start;
    part.grad = (const char *)whole->grad + start * (whole->grad_is_bf16 ? 2 : 4);
    return part;
}

enum { MAX_THREADS = 64, GRAIN = 64 }; /* shares begin at whole cache lines of every tensor */

/*
 * Step all elements with the kernel of this index, by `threads` threads, this one among them. They
 * live for one call: nothing is left behind, neither for a fork nor for the end of the process.
 */
void onefold_adam(
    int index, const struct adam_step *step, const struct adam_flats *flats, int threads)
{
    const char *names[2];
    kernel *kernels[2];
    if (index >= find_kernels(names, kernels))
        return;
    if (threads > MAX_THREADS)
        threads = MAX_THREADS;
    pthread_t others[MAX_THREADS];
    struct share shares[MAX_THREADS];
    bool is_started[MAX_THREADS];
    int64_t stop = flats->numel, grains = stop / GRAIN;
    for (int i = threads - 1; i > 0; i--) { /* the last shares first; what is left is ours */
        int64_t start = grains * i / threads * GRAIN;
        shares[i] = (struct share){kernels[index], step, cut(flats, start, stop)};
        is_started[i] = pthread_create(&others[i], NULL, run_share, &shares[i]) == 0;
        stop = start;
    }
    struct adam_flats own = cut(flats, 0, stop);
    kernels[index](step, &own);
    for (int i = 1; i < threads; i++) {
        if (is_started[i])
            pthread_join(others[i], NULL);
        else
            run_share(&shares[i]);
    }
}
