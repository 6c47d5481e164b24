// Instructions of a whole warp and of the memory system, as the PTX ISA manual describes them.
#include "runtime.h"
#include <cstring>

namespace cpu {

void check_atomic(const void* p, unsigned bytes) { check(p, bytes, ATOMIC, HERE); }

// c += a b, mma.sync.m16n8k16: a 16 x 16, b 16 x 8, c 16 x 8. With g = lane / 4 and t = lane % 4, a lane holds
//     a[2r], a[2r+1], r = 0..3:   row g + 8 (r % 2), columns 2t + 8 (r / 2) and one more
//     b[2r], b[2r+1], r = 0, 1:   column g, rows 2t + 8r and one more
//     c[e], e = 0..3:             row g + 8 (e / 2), column 2t + e % 2
// operands: the lane's eight values of a and four of b.
void multiply(int line, float* c, const float* operands) {
    exchange(line, "mma", 0xffffffffu, operands, 12 * sizeof(float), false, true);
    Busy busy;
    const float* of[32];
    for (int i = 0; i < 32; ++i) of[i] = static_cast<const float*>(mail_from(i));
    const int g = me->lane() / 4, t = me->lane() % 4;
    for (int e = 0; e < 4; ++e) {
        const int column = 2 * t + e % 2;
        for (int k = 0; k < 16; ++k) {          // depth k: in the lanes' pair k % 8 / 2, of it element k % 2, in register k / 8
            const float a = of[4 * g + k % 8 / 2][2 * (e / 2 + k / 8 * 2) + k % 2];
            const float b = of[4 * column + k % 8 / 2][8 + 2 * (k / 8) + k % 2];
            c[e] += a * b;
        }
    }
}

// ldmatrix.x4: lane i gives the address of row i % 8 of matrix i / 8, and gets of matrix m row g, columns 2t and 2t + 1
// (transposed: rows 2t and 2t + 1, column g).
void load_matrices(int line, unsigned* r, const void* row, bool transposed) {
    const Place place = HERE;
    exchange(line, transposed ? "ldmatrix_trans" : "ldmatrix", 0xffffffffu, &row, sizeof row, false, true);
    check(row, 16, LOAD, place);                // each lane answers for the row whose address it gave
    Busy busy;
    const int g = me->lane() / 4, t = me->lane() % 4;
    for (int m = 0; m < 4; ++m) {
        r[m] = 0;
        for (int upper = 0; upper < 2; ++upper) {
            const int i = transposed ? 2 * t + upper : g, j = transposed ? g : 2 * t + upper;
            const unsigned char* from;
            memcpy(&from, mail_from(8 * m + i), sizeof from);
            uint16_t x;
            memcpy(&x, from + 2 * j, 2);
            r[m] |= uint32_t(x) << 16 * upper;
        }
    }
}

// cp.async, at its worst: the old contents are gone as soon as a copy starts, and the new ones come with the wait, not before.
void start_copy(void* to, const void* from, bool there) {
    const Place place = HERE;
    if (there) check(from, 16, LOAD, place);
    check(to, 16, STORE, place);
    check(to, 16, COPY, place);
    Busy busy;
    for (int i = 0; i < 16; i += 2) memcpy((char*)to + i, POISON, 2);
    me->copies.back().push_back({(unsigned char*)to, (const unsigned char*)from, there, place});
}
void commit_copies() {
    Busy busy;
    me->copies.emplace_back();
}
void wait_for_copies(int pending) {
    Busy busy;
    while (int(me->copies.size()) - 1 > pending) {
        for (const Copy& c : me->copies.front()) {
            check(c.to, 16, LANDED, c.place);
            if (c.there) memcpy(c.to, c.from, 16); else memset(c.to, 0, 16);
        }
        me->copies.erase(me->copies.begin());
    }
}
}  // namespace cpu
