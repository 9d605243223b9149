/* Products of tiles by AVX-512: a row of C lies in a register, to which pairs of a row of B are
   added, each multiplied with the same pair of A. */

#define FEW 8 /* rows of two squares at once: 16 registers of C, two of B */

int tiles_of_this_process(void) { return IN_REGISTERS; }

static inline void begin_tiles(void *before) { (void)before; }
static inline void end_tiles(const void *before) { (void)before; }

static inline __m512bh in_every_lane(const number *pair) {
    int32_t both;
    memcpy(&both, pair, sizeof both);
    return (__m512bh)_mm512_set1_epi32(both);
}

static inline __attribute__((always_inline)) void
multiply_few(float *c, int added, const number *a, count a_step, const number *b, count b_right,
             count b_step, count steps) {
    __m512 left[FEW], right[FEW];
#pragma GCC unroll 8
    EACH(row, 0, FEW) {
        left[row] = added ? _mm512_loadu_ps(c + 16 * row) : _mm512_setzero_ps();
        right[row] = added ? _mm512_loadu_ps(c + SQUARE + 16 * row) : _mm512_setzero_ps();
    }
    EACH(step, 0, steps) {
        EACH(pair, 0, 16) {
            __m512bh first = (__m512bh)_mm512_loadu_si512(b + 32 * pair);
            __m512bh second = (__m512bh)_mm512_loadu_si512(b + b_right + 32 * pair);
#pragma GCC unroll 8
            EACH(row, 0, FEW) {
                __m512bh own = in_every_lane(a + 32 * row + 2 * pair);
                left[row] = _mm512_dpbf16_ps(left[row], own, first);
                right[row] = _mm512_dpbf16_ps(right[row], own, second);
            }
        }
        a += a_step;
        b += b_step;
    }
#pragma GCC unroll 8
    EACH(row, 0, FEW) {
        _mm512_storeu_ps(c + 16 * row, left[row]);
        _mm512_storeu_ps(c + SQUARE + 16 * row, right[row]);
    }
}

static inline void multiply_tiles(float *c, count down, int added, const number *a, count a_down,
                                  count a_step, const number *b, count b_right, count b_step,
                                  count steps) {
    EACH(square, 0, 2) for (count row = 0; row < 16; row += FEW)
        multiply_few(c + square * down + 16 * row, added, a + square * a_down + 32 * row, a_step,
                     b, b_right, b_step, steps);
}
