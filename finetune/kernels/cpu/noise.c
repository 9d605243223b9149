/* Draws a token of each row: the one with the largest share / noise, the noise exponential.

   The words are those of Philox4x32-10 (Salmon et al. 2011) with the counter (block, place, number,
   prompt) and the key (seed, step), a block for each quarter of the vocabulary's tokens: so token i
   has word i / blocks of block i % blocks. -log u is at least 1 - u: a token whose share / (1 - u)
   is below the best so far needs no logarithm. */

#include <math.h>
#include <stdint.h>

enum { ROUNDS = 10, AT_ONCE = 64 };

static void words_of(uint32_t first, uint32_t place, uint32_t number, uint32_t prompt,
                     uint32_t seed, uint32_t step, uint32_t words[4][AT_ONCE])
{
    for (int at = 0; at < AT_ONCE; at++) {
        uint32_t a = first + at, b = place, c = number, d = prompt, one = seed, two = step;
        for (int round = 0; round < ROUNDS; round++) {
            uint64_t left = (uint64_t)0xD2511F53u * a, right = (uint64_t)0xCD9E8D57u * c;
            a = (uint32_t)(right >> 32) ^ b ^ one;
            b = (uint32_t)right;
            c = (uint32_t)(left >> 32) ^ d ^ two;
            d = (uint32_t)left;
            one += 0x9E3779B9u;
            two += 0xBB67AE85u;
        }
        words[0][at] = a;
        words[1][at] = b;
        words[2][at] = c;
        words[3][at] = d;
    }
}

void draw(const float *shares, const int64_t *names, int64_t rows, int64_t vocabulary,
          uint32_t seed, uint32_t step, uint32_t place, int64_t *tokens)
{
    const double unit = 1.0 / 4294967296.0, rounding = 1 - 1e-12;
    const int64_t blocks = (vocabulary + 3) / 4;
    uint32_t words[4][AT_ONCE];
    for (int64_t row = 0; row < rows; row++) {
        const float *share = shares + row * vocabulary;
        double best = -1;
        int64_t token = 0;
        for (int64_t start = 0; start < blocks; start += AT_ONCE) {
            const int64_t some = blocks - start < AT_ONCE ? blocks - start : AT_ONCE;
            words_of((uint32_t)start, place, (uint32_t)names[2 * row + 1],
                     (uint32_t)names[2 * row], seed, step, words);
            for (int part = 0; part < 4; part++) {
                const int64_t offset = part * blocks + start;
                for (int64_t at = 0; at < some && offset + at < vocabulary; at++) {
                    const uint32_t word = words[part][at];
                    const double least = ((double)~word + 0.5) * unit; /* 1 - u */
                    if (share[offset + at] < best * least * rounding)
                        continue;
                    const double reached =
                        1.0 / -log(((double)word + 0.5) * unit) * share[offset + at];
                    if (reached > best) {
                        best = reached;
                        token = offset + at;
                    }
                }
            }
        }
        tokens[row] = token;
    }
}
