/*
 * Block-quantized messages, int8 and int4: what wire/codec.py computes with torch, to the bit,
 * in one pass over memory. There it says why a message is what it is; every operation here is one
 * of fp32, correctly rounded, in the same order.
 *
 *     scale = max(amax / 127 or 7, 2^-126), rounded to bf16      q = rint(x * (1 / scale))
 *
 * A group is widened, rotated and measured while it lies in the first cache.
 */
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include "common.h"

enum { LANES = 4, QUADS = WIDTH / LANES }; /* compiling.py defines the others */

/*
 * Messages of one length and what they say: of fp32 or bf16 elements, decoded over them or added to
 * them, one after the other. Strides lead to the next one; values may have one of 0.
 */
struct message {
    int64_t numel, group; /* group: a multiple of WIDTH up to MAX_GROUP */
    uint16_t *scales;     /* [ceil(numel / group)] */
    uint8_t *payload;     /* [numel], or [ceil(numel / 2)] */
    void *values;         /* [numel] */
    int32_t is_int4, is_rotated, is_bf16, adds;
    int64_t num_scales, num_bytes, num_values; /* how many there is room for in each */
    int64_t rows, message_stride, values_stride; /* of messages; in bytes */
};

/* Whether groups fit into the buffers of a loop, and the message into its own. */
static bool fits(const struct message *m)
{
    if (m->numel < 0 || m->group < WIDTH || m->group > MAX_GROUP || m->group % WIDTH)
        return false;
    int64_t groups = m->numel / m->group + (m->numel % m->group != 0);
    int64_t nbytes = m->is_int4 ? m->numel / 2 + m->numel % 2 : m->numel;
    return m->num_scales >= groups && m->num_bytes >= nbytes && m->num_values >= m->numel;
}

INLINED uint32_t bits_of(float value)
{
    union bits wide = {.value = value};
    return wide.whole;
}

/* The integer nearest to |value| < 2^22, ties to even, in the low bits: two's complement. */
INLINED uint32_t nearest(float value)
{
    return bits_of(value + 12582912.0f); /* 1.5 * 2^23: the last bit of its significand is 1 */
}

/* Four floats, which every instruction set has registers for. */
typedef float quad __attribute__((vector_size(16)));
typedef int32_t quad_index __attribute__((vector_size(16)));

#if defined(__clang__)
#define SHUFFLED(v, a, b, c, d) __builtin_shufflevector(v, v, a, b, c, d)
#else
#define SHUFFLED(v, a, b, c, d) __builtin_shuffle(v, (quad_index){a, b, c, d})
#endif

/* H of WIDTH elements in place: sums and differences of neighbours 1, 2, 4, 8 and 16 apart. */
INLINED void transform(float *block)
{
    const quad odd = {1, -1, 1, -1}, high = {1, 1, -1, -1}; /* a + b*-1 is a - b, to the bit */
    quad v[QUADS];
#pragma GCC unroll 8
    for (int i = 0; i < QUADS; i++) {
        memcpy(&v[i], block + i * LANES, sizeof v[i]);
        v[i] = SHUFFLED(v[i], 1, 0, 3, 2) + v[i] * odd;
        v[i] = SHUFFLED(v[i], 2, 3, 0, 1) + v[i] * high;
    }
#pragma GCC unroll 3
    for (int apart = 1; apart < QUADS; apart *= 2)
#pragma GCC unroll 8
        for (int i = 0; i < QUADS; i++)
            if (!(i & apart)) {
                quad a = v[i], b = v[i + apart];
                v[i] = a + b;
                v[i + apart] = a - b;
            }
#pragma GCC unroll 8
    for (int i = 0; i < QUADS; i++)
        memcpy(block + i * LANES, &v[i], sizeof v[i]);
}

INLINED void scale_by(float *work, int n, float factor)
{
    for (int i = 0; i < n; i++)
        work[i] *= factor;
}

/* wire/codec.py: H/32 in, H out, and what follows the last whole block divided by TAIL. */
INLINED void rotate(float *work, int n)
{
    int whole = n / WIDTH * WIDTH;
    scale_by(work, whole, 1.0f / WIDTH);
    scale_by(work + whole, n - whole, 1.0f / TAIL);
    for (int i = 0; i < whole; i += WIDTH)
        transform(work + i);
}

INLINED void rotate_back(float *work, int n)
{
    int whole = n / WIDTH * WIDTH;
    scale_by(work + whole, n - whole, TAIL);
    for (int i = 0; i < whole; i += WIDTH)
        transform(work + i);
}

INLINED void encode_group(
    const float *restrict x, int n, uint16_t *restrict scale, uint8_t *restrict payload,
    bool is_int4)
{
    uint32_t largest = 0; /* of magnitudes as integers: infinity and NaN are above all numbers */
    for (int i = 0; i < n; i++) {
        uint32_t magnitude = bits_of(x[i]) & 0x7fffffff;
        largest = magnitude > largest ? magnitude : largest;
    }
    if (largest >= 0x7f800000) {
        *scale = 0x7fc0;
        memset(payload, 0, is_int4 ? (n + 1) / 2 : n);
        return;
    }
    union bits amax = {.whole = largest};
    float quotient = amax.value / (is_int4 ? LARGEST_INT4 : LARGEST_INT8);
    *scale = rounded(quotient > SMALLEST_SCALE ? quotient : SMALLEST_SCALE);
    float inverse = 1.0f / widened(*scale);
    if (!is_int4) {
        for (int i = 0; i < n; i++)
            payload[i] = (uint8_t)nearest(x[i] * inverse);
        return;
    }
    for (int i = 0; i < n / 2; i++) {
        uint32_t low = nearest(x[2 * i] * inverse), high = nearest(x[2 * i + 1] * inverse);
        payload[i] = (uint8_t)((low & 0xf) | high << 4);
    }
    if (n % 2)
        payload[n / 2] = (uint8_t)(nearest(x[n - 1] * inverse) & 0xf);
}

INLINED void decode_group(
    const uint8_t *restrict payload, int n, float scale, float *restrict out, bool is_int4,
    bool adds)
{
    if (!is_int4) {
        for (int i = 0; i < n; i++) {
            float value = (float)(int8_t)payload[i] * scale;
            out[i] = adds ? out[i] + value : value;
        }
        return;
    }
    int8_t q[MAX_GROUP]; /* two loops are vectorised where one is not */
    for (int i = 0; i < (n + 1) / 2; i++) {
        q[2 * i] = (int8_t)((payload[i] & 0xf) ^ 8) - 8; /* the sign of a nibble is bit 3 */
        q[2 * i + 1] = (int8_t)(payload[i] >> 4 ^ 8) - 8;
    }
    for (int i = 0; i < n; i++) {
        float value = (float)q[i] * scale;
        out[i] = adds ? out[i] + value : value;
    }
}

INLINED void encode(const struct message *m, bool is_int4, bool is_rotated, bool is_bf16)
{
    float work[MAX_GROUP];
    uint8_t *payload = m->payload;
    for (int64_t start = 0, g = 0; start < m->numel; start += m->group, g++) {
        int n = (int)(m->numel - start < m->group ? m->numel - start : m->group);
        const float *x = (const float *)m->values + start;
        if (is_bf16) {
            const uint16_t *narrow = (const uint16_t *)m->values + start;
            for (int i = 0; i < n; i++)
                work[i] = widened(narrow[i]);
            x = work;
        } else if (is_rotated) {
            memcpy(work, x, sizeof *work * n);
            x = work;
        }
        if (is_rotated)
            rotate(work, n);
        encode_group(x, n, &m->scales[g], payload, is_int4);
        payload += is_int4 ? n / 2 : n;
    }
}

INLINED void decode(const struct message *m, bool is_int4, bool is_rotated, bool is_bf16, bool adds)
{
    float work[MAX_GROUP];
    const uint8_t *payload = m->payload;
    bool is_direct = !is_rotated && !is_bf16;
    for (int64_t start = 0, g = 0; start < m->numel; start += m->group, g++) {
        int n = (int)(m->numel - start < m->group ? m->numel - start : m->group);
        float *wide = (float *)m->values + start;
        float scale = widened(m->scales[g]);
        decode_group(payload, n, scale, is_direct ? wide : work, is_int4, is_direct && adds);
        payload += is_int4 ? n / 2 : n;
        if (is_rotated)
            rotate_back(work, n);
        if (is_bf16) {
            uint16_t *narrow = (uint16_t *)m->values + start;
            for (int i = 0; i < n; i++)
                narrow[i] = rounded(work[i]);
        } else if (is_rotated) {
            for (int i = 0; i < n; i++)
                wide[i] = adds ? wide[i] + work[i] : work[i];
        }
    }
}

/* One loop for each kind of message: the flags are constants where it is inlined. */
INLINED void encode_any(const struct message *m)
{
    bool is_rotated = m->is_rotated;
    if (m->is_int4)
        m->is_bf16 ? encode(m, true, is_rotated, true) : encode(m, true, is_rotated, false);
    else
        m->is_bf16 ? encode(m, false, is_rotated, true) : encode(m, false, is_rotated, false);
}

INLINED void decode_any(const struct message *m)
{
    bool is_rotated = m->is_rotated;
    if (m->is_bf16) /* is only written over, so `adds` is false */
        m->is_int4 ? decode(m, true, is_rotated, true, false)
                   : decode(m, false, is_rotated, true, false);
    else if (m->adds)
        m->is_int4 ? decode(m, true, is_rotated, false, true)
                   : decode(m, false, is_rotated, false, true);
    else
        m->is_int4 ? decode(m, true, is_rotated, false, false)
                   : decode(m, false, is_rotated, false, false);
}

/* The same code once for each instruction set. */
typedef void kernel(const struct message *);

#define DEFINE_KERNELS(suffix, attributes)                                             \
    attributes static void encode_##suffix(const struct message *m) { encode_any(m); } \
    attributes static void decode_##suffix(const struct message *m) { decode_any(m); }

DEFINE_KERNELS(baseline, )
#if defined(__x86_64__)
DEFINE_KERNELS(avx512, AVX512)
DEFINE_KERNELS(avx2, AVX2)
#endif

struct kernels {
    const char *name;
    kernel *encode, *decode;
};

/* The kernels that this CPU runs, the fastest first; returns how many they are. */
static int find_kernels(struct kernels found[3])
{
    int count = 0;
#if defined(__x86_64__)
    if (HAS_AVX512)
        found[count++] = (struct kernels){"AVX-512", encode_avx512, decode_avx512};
    if (HAS_AVX2)
        found[count++] = (struct kernels){"AVX2", encode_avx2, decode_avx2};
#endif
    found[count++] = (struct kernels){"baseline", encode_baseline, decode_baseline};
    return count;
}

/* The name of a kernel that this CPU runs, counted from the fastest; NULL after the last. */
const char *onefold_codec_name(int index)
{
    struct kernels found[3];
    return index < find_kernels(found) ? found[index].name : NULL;
}

static void run_rows(kernel *run, const struct message *m)
{
    struct message row = *m;
    for (int64_t i = 0; i < m->rows; i++) {
        row.scales = (uint16_t *)((char *)m->scales + i * m->message_stride);
        row.payload = m->payload + i * m->message_stride;
        row.values = (char *)m->values + i * m->values_stride;
        run(&row);
    }
}

/* Both return 0, or 1 for messages that do not fit, of which nothing is written. */
int onefold_codec_encode(int index, const struct message *message)
{
    struct kernels found[3];
    bool is_good = index >= 0 && index < find_kernels(found) && fits(message);
    if (is_good)
        run_rows(found[index].encode, message);
    return !is_good;
}

int onefold_codec_decode(int index, const struct message *message)
{
    struct kernels found[3];
    bool is_good = index >= 0 && index < find_kernels(found) && fits(message);
    if (is_good)
        run_rows(found[index].decode, message);
    return !is_good;
}
