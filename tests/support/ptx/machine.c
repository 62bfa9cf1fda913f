/* Executes kernels in PTX on the CPU: blocks of warps of 32 lanes, as __init__.py describes.

   A register holds 64 bits for each lane of a warp; narrower values occupy its low bits. Lanes of a
   warp go in lockstep: those with the least program counter go first, so that lanes that took
   different branches meet again. Several blocks are resident at a time. The next block, its next
   warp and how many instructions it executes are drawn at random.

   Each access to memory is checked: it must be aligned and within a tensor. A race is two accesses
   to one address, at least one of which writes and one of which is no atomic, by two blocks of a
   launch, or by two warps of a block without a barrier between them. Each element of memory has a
   record of its last accesses, so a race is found whatever order was drawn. */

#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

typedef uint8_t u8;
typedef uint16_t u16;
typedef uint32_t u32;
typedef uint64_t u64;
typedef int16_t s16;
typedef int32_t s32;
typedef int64_t s64;
typedef __int128 s128;
typedef unsigned __int128 u128;

enum { LANES = 32, MOST_WARPS = 32, MOST_RESIDENT = 64, SECTOR = 32 };
static const u32 ALL = 0xFFFFFFFFu;

/* ---- numbers ------------------------------------------------------------------------------- */

static inline float as_f32(u64 x) { u32 y = (u32)x; float f; memcpy(&f, &y, 4); return f; }
static inline double as_f64(u64 x) { double f; memcpy(&f, &x, 8); return f; }
static inline u32 f32(float f) { u32 x; memcpy(&x, &f, 4); return f != f ? 0x7FFFFFFFu : x; }
static inline u64 f64(double f) { u64 x; memcpy(&x, &f, 8); return f != f ? 0x7FFFFFFFFFFFFFFFull : x; }

static inline u16 bf16(float f) {
    u32 x = f32(f);
    return f != f ? 0x7FFF : (u16)((x + 0x7FFF + ((x >> 16) & 1)) >> 16);
}
static inline u16 f16(float f) {
    _Float16 h = (_Float16)f;
    u16 x;
    memcpy(&x, &h, 2);
    return f != f ? 0x7FFF : x;
}
static inline float from_f16(u64 x) {
    u16 y = (u16)x;
    _Float16 h;
    memcpy(&h, &y, 2);
    return (float)h;
}

/* Of two numbers one of which is NaN, the other; -0 is less than +0. */
static inline u32 max_f32(u64 x, u64 y) {
    float a = as_f32(x), b = as_f32(y);
    if (a != a || b != b) return a != a ? f32(b) : f32(a);
    if (a == b) return (u32)x & (u32)y;
    return f32(a > b ? a : b);
}
static inline u32 min_f32(u64 x, u64 y) {
    float a = as_f32(x), b = as_f32(y);
    if (a != a || b != b) return a != a ? f32(b) : f32(a);
    if (a == b) return (u32)x | (u32)y;
    return f32(a < b ? a : b);
}

static inline u64 max_f64(u64 x, u64 y) {
    double a = as_f64(x), b = as_f64(y);
    if (a != a || b != b) return a != a ? f64(b) : f64(a);
    if (a == b) return x & y;
    return f64(a > b ? a : b);
}
static inline u64 min_f64(u64 x, u64 y) {
    double a = as_f64(x), b = as_f64(y);
    if (a != a || b != b) return a != a ? f64(b) : f64(a);
    if (a == b) return x | y;
    return f64(a < b ? a : b);
}

/* Towards zero, within the range of the type; NaN becomes 0, or the least int64. */
static inline s64 whole64(double x) {
    if (x != x || x <= -0x1p63) return INT64_MIN;
    return x >= 0x1p63 ? INT64_MAX : (s64)x;
}
static inline s32 whole32(double x) {
    if (x != x) return 0;
    return x >= 0x1p31 ? INT32_MAX : x <= -0x1p31 ? INT32_MIN : (s32)x;
}

static inline u32 shifted_left32(u32 x, u32 by) { return by > 31 ? 0 : x << by; }
static inline u64 shifted_left64(u64 x, u32 by) { return by > 63 ? 0 : x << by; }
static inline u32 shifted_right32(u32 x, u32 by) { return by > 31 ? 0 : x >> by; }
static inline u64 shifted_right64(u64 x, u32 by) { return by > 63 ? 0 : x >> by; }

static inline u32 field(u32 x, u32 from, u32 bits) {
    from &= 255, bits &= 255;
    if (bits == 0 || from > 31) return 0;
    return (x >> from) & (bits > 31 ? ALL : (1u << bits) - 1);
}
static inline u32 signed_field(u32 x, u32 from, u32 bits) {
    u32 found = field(x, from, bits), last = (from & 255) + (bits & 255) - 1;
    if ((bits & 255) == 0) return 0;
    int is_negative = x >> (last > 31 ? 31 : last) & 1;
    u32 width = bits & 255;
    if ((from & 255) > 31) return is_negative ? ALL : 0;
    if ((from & 255) + width > 32) width = 32 - (from & 255);
    return is_negative && width < 32 ? found | ALL << width : found;
}
static inline u32 permuted(u32 low, u32 high, u32 choice) {
    u64 bytes = (u64)high << 32 | low;
    u32 result = 0;
    for (int i = 0; i < 4; i++) {
        u32 chosen = choice >> (4 * i) & 15;
        u32 byte = bytes >> (8 * (chosen & 7)) & 255;
        if (chosen & 8) byte = byte & 128 ? 255 : 0;
        result |= byte << (8 * i);
    }
    return result;
}

/* ---- instructions --------------------------------------------------------------------------

   ALU(name, expression): the name is that of PTX with underscores for dots; a, b and c are the
   sources of a lane. Only instructions that round as IEEE 754 says are here: a kernel that has an
   approximate one, or one that the assembler may fuse, is refused. */

#define A32 ((u32)a)
#define B32 ((u32)b)
#define C32 ((u32)c)
#define AF as_f32(a)
#define BF as_f32(b)
#define AD as_f64(a)
#define BD as_f64(b)

#define COMPARE_WHOLE(suffix, T) \
    ALU(setp_eq_##suffix, (T)a == (T)b) ALU(setp_ne_##suffix, (T)a != (T)b) \
    ALU(setp_lt_##suffix, (T)a < (T)b) ALU(setp_le_##suffix, (T)a <= (T)b) \
    ALU(setp_gt_##suffix, (T)a > (T)b) ALU(setp_ge_##suffix, (T)a >= (T)b)
#define COMPARE_FLOAT(suffix, x, y) \
    ALU(setp_eq_##suffix, x == y) ALU(setp_ne_##suffix, x < y || x > y) \
    ALU(setp_lt_##suffix, x < y) ALU(setp_le_##suffix, x <= y) \
    ALU(setp_gt_##suffix, x > y) ALU(setp_ge_##suffix, x >= y) \
    ALU(setp_equ_##suffix, !(x < y || x > y)) ALU(setp_neu_##suffix, x != y) \
    ALU(setp_ltu_##suffix, !(x >= y)) ALU(setp_leu_##suffix, !(x > y)) \
    ALU(setp_gtu_##suffix, !(x <= y)) ALU(setp_geu_##suffix, !(x < y)) \
    ALU(setp_nan_##suffix, x != x || y != y) ALU(setp_num_##suffix, x == x && y == y)
#define WHOLE(bits, U, S) \
    ALU(add_s##bits, (U)(a + b)) ALU(sub_s##bits, (U)(a - b)) ALU(neg_s##bits, (U)(0 - a)) \
    ALU(mul_lo_s##bits, (U)(a * b)) ALU(mad_lo_s##bits, (U)(a * b + c)) \
    ALU(min_s##bits, (U)((S)a < (S)b ? a : b)) ALU(max_s##bits, (U)((S)a > (S)b ? a : b)) \
    ALU(min_u##bits, (U)a < (U)b ? (U)a : (U)b) ALU(max_u##bits, (U)a > (U)b ? (U)a : (U)b) \
    ALU(div_s##bits, (U)((S)b == -1 ? 0 - a : (S)b ? (U)((S)a / (S)b) : (U)-1)) \
    ALU(rem_s##bits, (U)((S)b == -1 ? 0 : (S)b ? (U)((S)a % (S)b) : (U)-1)) \
    ALU(div_u##bits, (U)b ? (U)a / (U)b : (U)-1) ALU(rem_u##bits, (U)b ? (U)a % (U)b : (U)-1) \
    ALU(and_b##bits, (U)(a & b)) ALU(or_b##bits, (U)(a | b)) ALU(xor_b##bits, (U)(a ^ b)) \
    ALU(not_b##bits, (U)~a) ALU(mov_b##bits, (U)a) ALU(mov_u##bits, (U)a) \
    ALU(selp_b##bits, (U)(c & 1 ? a : b)) \
    COMPARE_WHOLE(b##bits, U) COMPARE_WHOLE(u##bits, U) COMPARE_WHOLE(s##bits, S)

#define ALUS \
    WHOLE(16, u16, s16) WHOLE(32, u32, s32) WHOLE(64, u64, s64) \
    ALU(and_pred, a & b & 1) ALU(or_pred, (a | b) & 1) ALU(xor_pred, (a ^ b) & 1) \
    ALU(not_pred, ~a & 1) ALU(mov_pred, a & 1) \
    ALU(mul_wide_s16, (u32)((s32)(s16)a * (s16)b)) ALU(mul_wide_u16, (u32)(u16)a * (u16)b) \
    ALU(mul_wide_s32, (u64)((s64)(s32)a * (s32)b)) ALU(mul_wide_u32, (u64)A32 * B32) \
    ALU(mad_wide_s32, (u64)((s64)(s32)a * (s32)b) + c) ALU(mad_wide_u32, (u64)A32 * B32 + c) \
    ALU(mul_hi_u16, (u32)(u16)a * (u16)b >> 16) \
    ALU(mul_hi_u32, (u64)A32 * B32 >> 32) \
    ALU(mul_hi_s32, (u32)((s64)(s32)a * (s32)b >> 32)) \
    ALU(mul_hi_u64, (u64)((u128)a * b >> 64)) \
    ALU(mul_hi_s64, (u64)((s128)(s64)a * (s64)b >> 64)) \
    ALU(shl_b16, (u16)shifted_left32((u16)a, B32)) ALU(shl_b32, shifted_left32(A32, B32)) \
    ALU(shl_b64, shifted_left64(a, B32)) \
    ALU(shr_u16, shifted_right32((u16)a, B32)) ALU(shr_u32, shifted_right32(A32, B32)) \
    ALU(shr_u64, shifted_right64(a, B32)) \
    ALU(shr_s16, (u16)((s16)a >> (B32 > 15 ? 15 : B32))) \
    ALU(shr_s32, (u32)((s32)a >> (B32 > 31 ? 31 : B32))) \
    ALU(shr_s64, (u64)((s64)a >> (B32 > 63 ? 63 : B32))) \
    ALU(popc_b32, __builtin_popcount(A32)) ALU(bfe_u32, field(A32, B32, C32)) ALU(bfe_s32, signed_field(A32, B32, C32)) ALU(prmt_b32, permuted(A32, B32, C32)) \
    ALU(add_rn_f32, f32(AF + BF)) ALU(sub_rn_f32, f32(AF - BF)) ALU(mul_rn_f32, f32(AF * BF)) \
    ALU(div_rn_f32, f32(AF / BF)) ALU(sqrt_rn_f32, f32(sqrtf(AF))) \
    ALU(add_rn_f64, f64(AD + BD)) ALU(sub_rn_f64, f64(AD - BD)) ALU(mul_rn_f64, f64(AD * BD)) \
    ALU(div_rn_f64, f64(AD / BD)) ALU(sqrt_rn_f64, f64(sqrt(AD))) \
    ALU(neg_f32, A32 ^ 0x80000000u) ALU(abs_f32, A32 & 0x7FFFFFFFu) \
    ALU(neg_f64, a ^ 0x8000000000000000ull) ALU(abs_f64, a & 0x7FFFFFFFFFFFFFFFull) \
    ALU(min_f32, min_f32(a, b)) ALU(max_f32, max_f32(a, b)) \
    ALU(min_f64, min_f64(a, b)) ALU(max_f64, max_f64(a, b)) \
    ALU(selp_f32, (u32)(c & 1 ? a : b)) ALU(selp_f64, c & 1 ? a : b) \
    COMPARE_FLOAT(f32, AF, BF) COMPARE_FLOAT(f64, AD, BD) \
    ALU(cvt_u16_u32, (u16)a) ALU(cvt_u32_u16, (u16)a) ALU(cvt_u64_u16, (u16)a) \
    ALU(cvt_u32_u64, A32) ALU(cvt_u64_u32, A32) ALU(cvt_u16_u64, (u16)a) \
    ALU(cvt_s64_s32, (u64)(s64)(s32)a) ALU(cvt_s32_s16, (u32)(s32)(s16)a) \
    ALU(cvt_s64_s16, (u64)(s64)(s16)a) ALU(cvt_u16_u8, (u8)a) ALU(cvt_u32_u8, (u8)a) \
    ALU(cvt_u64_u8, (u8)a) ALU(cvt_s16_s8, (u16)(s16)(int8_t)a) ALU(cvt_s32_s8, (u32)(s32)(int8_t)a) \
    ALU(cvt_f32_bf16, f32(as_f32((u64)(u16)a << 16))) ALU(cvt_f32_f16, f32(from_f16(a))) \
    ALU(cvt_f64_bf16, f64(as_f32((u64)(u16)a << 16))) ALU(cvt_f64_f32, f64(AF)) \
    ALU(cvt_f64_f16, f64(from_f16(a))) \
    ALU(cvt_rn_bf16_f32, bf16(AF)) ALU(cvt_rn_f16_f32, f16(AF)) \
    ALU(cvt_rn_bf16x2_f32, (u32)bf16(AF) << 16 | bf16(BF)) \
    ALU(cvt_rn_f16x2_f32, (u32)f16(AF) << 16 | f16(BF)) \
    ALU(cvt_rn_f32_f64, f32((float)AD)) \
    ALU(cvt_rn_f32_s16, f32((float)(s16)a)) ALU(cvt_rn_f32_u16, f32((float)(u16)a)) \
    ALU(cvt_rn_f32_s32, f32((float)(s32)a)) ALU(cvt_rn_f32_u32, f32((float)A32)) \
    ALU(cvt_rn_f32_s64, f32((float)(s64)a)) ALU(cvt_rn_f32_u64, f32((float)a)) \
    ALU(cvt_rn_f64_s64, f64((double)(s64)a)) ALU(cvt_rn_f64_u64, f64((double)a)) \
    ALU(cvt_rn_f64_s32, f64((double)(s32)a)) ALU(cvt_rn_f64_u32, f64((double)A32)) \
    ALU(cvt_rzi_s32_f32, (u32)whole32(AF)) ALU(cvt_rzi_s64_f32, (u64)whole64(AF)) \
    ALU(cvt_rzi_s64_f64, (u64)whole64(AD)) ALU(cvt_rzi_s32_f64, (u32)whole32(AD))

/* Instructions that are more than a function of a lane's sources. */
#define OTHERS \
    OTHER(join) OTHER(part) OTHER(branch) OTHER(ret) OTHER(nop) OTHER(bar_sync) \
    OTHER(ld_global) OTHER(st_global) OTHER(ld_shared) OTHER(st_shared) \
    OTHER(atom_max_s32) OTHER(atom_min_s32) OTHER(atom_or_b32) OTHER(atom_and_b32) \
    OTHER(atom_add_u32) OTHER(atom_exch_b32) OTHER(atom_add_u64) \
    OTHER(shfl_bfly) OTHER(shfl_idx) OTHER(redux_max_s32) OTHER(redux_min_s32) \
    OTHER(redux_max_u32) OTHER(redux_min_u32) OTHER(redux_add_s32) \
    OTHER(ldmatrix) OTHER(ldmatrix_trans) OTHER(stmatrix) OTHER(stmatrix_trans)

enum Operation {
#define ALU(name, expression) DO_##name,
#define OTHER(name) DO_##name,
    ALUS OTHERS
#undef ALU
#undef OTHER
};

static const char *const NAMES[] = {
#define ALU(name, expression) #name,
#define OTHER(name) #name,
    ALUS OTHERS
#undef ALU
#undef OTHER
};

int operation_number(const char *name) {
    for (size_t i = 0; i < sizeof NAMES / sizeof *NAMES; i++)
        if (!strcmp(NAMES[i], name)) return (int)i;
    return -1;
}

/* ---- the machine --------------------------------------------------------------------------- */

typedef struct {
    s32 operation;
    s32 guard;   /* a register, or -1 */
    s32 negated; /* whether the guard must be false */
    s32 count;   /* of registers that are loaded or stored, or parts of a number */
    s32 bytes;   /* of each */
    s32 target;  /* of a branch */
    s32 base;    /* the register of an address */
    s32 line;    /* of the PTX */
    s32 destination[4];
    s32 source[4];
    s64 offset; /* of an address */
} Instruction;

typedef struct {
    u64 begin, end;
    u64 element; /* bytes that have one record of accesses */
} Range;

typedef struct {
    const Instruction *code;
    s32 length, registers, fixed; /* the last `fixed` registers are set when a block begins */
    const u64 *values;            /* theirs, but for the first seven: see begin_block */
    s32 warps, shared_bytes;
    const Range *ranges;
    s32 range_count, finds_races;
    u32 grid[3];
    u64 first_program, programs; /* of the grid, in the order x, y, z */
    u64 seed;
    s32 resident;
} Job;

enum Fault {
    NO_FAULT, MISALIGNED, OUT_OF_BOUNDS, OUT_OF_SHARED, DIVERGED, STUCK, RACE_OF_BLOCKS,
    RACE_OF_WARPS, RACE_OF_LANES, TOO_LONG
};

typedef struct {
    s64 fault, address, line, other_line;
    u64 instructions, loads, stores, sectors, atomics, barriers;
    u64 longest_warp, longest_loads, longest_program;
} Result;

typedef struct { /* the last accesses of one kind: by which block, when, and by how many */
    u32 block, epoch, line;
    u16 warp;
    u8 many_blocks, many_warps;
} Access;

typedef struct {
    Access read, write, atomic;
    u64 step; /* of the last write */
} Record;

typedef struct {
    u64 (*registers)[LANES];
    u32 pc[LANES];
    u32 live, waiting;
    u64 instructions, loads;
} Warp;

typedef struct {
    Warp warps[MOST_WARPS];
    u8 *shared;
    Record *shared_records;
    u64 program;
    u32 epoch;
} Block;

static const Job *job;
static Result result;
static Record **records; /* one array for each range */
static u64 random_state, steps;

static u64 draw(u64 below) {
    random_state ^= random_state << 13;
    random_state ^= random_state >> 7;
    random_state ^= random_state << 17;
    return below ? random_state % below : 0;
}

static void fail(enum Fault fault, u64 address, int line, int other_line) {
    if (result.fault) return;
    result.fault = fault, result.address = (s64)address, result.line = line;
    result.other_line = other_line;
}

/* Notes an access by a warp. Accesses of one block that a barrier divides are in order. */
static void note(Access *last, const Block *block, int warp, int line) {
    u32 number = (u32)block->program + 1;
    if (last->block != number) {
        last->many_blocks |= last->block != 0;
        last->many_warps = 0;
    } else if (last->epoch != block->epoch) {
        last->many_warps = 0;
    } else if (last->warp != warp) {
        last->many_warps = 1;
    }
    last->block = number, last->epoch = block->epoch, last->warp = (u16)warp, last->line = (u32)line;
}

static void meet(const Access *last, const Block *block, int warp, u64 address, int line) {
    if (!last->block) return;
    if (last->many_blocks || last->block != (u32)block->program + 1)
        fail(RACE_OF_BLOCKS, address, line, (int)last->line);
    else if (last->epoch == block->epoch && (last->many_warps || last->warp != warp))
        fail(RACE_OF_WARPS, address, line, (int)last->line);
}

enum Kind { READ, WRITE, ATOMIC };

/* Every warp may store a number that all of them hold: what changes nothing counts as no write. */
static void record(
    Record *at, enum Kind kind, const Block *block, int warp, u64 address, int line, int is_changed
) {
    if (kind == WRITE && !is_changed && at->write.block) return;
    if (kind != READ) meet(&at->read, block, warp, address, line);
    if (kind != ATOMIC) meet(&at->atomic, block, warp, address, line);
    if (kind == WRITE && at->step == steps) {
        if (is_changed) fail(RACE_OF_LANES, address, line, line);
    } else {
        meet(&at->write, block, warp, address, line);
    }
    if (kind == WRITE) at->step = steps;
    note(kind == READ ? &at->read : kind == WRITE ? &at->write : &at->atomic, block, warp, line);
}

/* Checks an access of `bytes` bytes that writes `new`, if any, in parts of `part` bytes. */
static int check_global(
    const Block *block, int warp, u64 address, int bytes, enum Kind kind, const u8 *new, int line
) {
    if (address % (u64)bytes) return fail(MISALIGNED, address, line, 0), 0;
    int low = 0, high = job->range_count;
    while (low < high) {
        int middle = (low + high) / 2;
        if (job->ranges[middle].begin <= address) low = middle + 1;
        else high = middle;
    }
    if (!low || address + (u64)bytes > job->ranges[low - 1].end)
        return fail(OUT_OF_BOUNDS, address, line, 0), 0;
    if (job->finds_races) {
        const Range *range = &job->ranges[low - 1];
        u64 first = (address - range->begin) / range->element;
        u64 last = (address + (u64)bytes - 1 - range->begin) / range->element;
        int is_changed = new && memcmp((const void *)address, new, (size_t)bytes);
        for (u64 i = first; i <= last; i++)
            record(&records[low - 1][i], kind, block, warp, address, line, is_changed);
    }
    return 1;
}

static int check_shared(
    Block *block, int warp, s64 at, int bytes, enum Kind kind, const u8 *new, int line
) {
    if (at < 0 || at + bytes > job->shared_bytes) return fail(OUT_OF_SHARED, (u64)at, line, 0), 0;
    if (at % bytes) return fail(MISALIGNED, (u64)at, line, 0), 0;
    if (job->finds_races) {
        int is_changed = new && memcmp(block->shared + at, new, (size_t)bytes);
        for (int i = 0; i < bytes; i++)
            record(&block->shared_records[at + i], kind, block, warp, (u64)at, line, is_changed);
    }
    return 1;
}

typedef struct {
    u64 seen[LANES];
    int count;
} Sectors;

/* Whether no lane before has accessed a sector of memory in the same instruction. */
static int is_new(Sectors *sectors, u64 sector) {
    for (int i = sectors->count; i-- > 0;)
        if (sectors->seen[i] == sector) return 0;
    sectors->seen[sectors->count++] = sector;
    return 1;
}

static void access_memory(Block *block, int number, const Instruction *it, u32 active) {
    Warp *warp = &block->warps[number];
    int is_load = it->operation == DO_ld_global || it->operation == DO_ld_shared;
    int is_global = it->operation == DO_ld_global || it->operation == DO_st_global;
    int bytes = it->bytes * it->count;
    if (is_global) {
        if (is_load) result.loads++, warp->loads++;
        else result.stores++;
    }
    Sectors sectors = {0};
    for (int i = 0; i < LANES; i++) {
        if (!(active >> i & 1)) continue;
        u8 buffer[32];
        if (!is_load)
            for (int k = 0; k < it->count; k++)
                memcpy(buffer + k * it->bytes, &warp->registers[it->source[k]][i], (size_t)it->bytes);
        u64 base = warp->registers[it->base][i];
        const u8 *new = is_load ? NULL : buffer;
        u8 *memory;
        if (is_global) {
            u64 address = base + (u64)it->offset;
            if (!check_global(block, number, address, bytes, is_load ? READ : WRITE, new, it->line))
                return;
            memory = (u8 *)address;
            if (is_new(&sectors, address / SECTOR)) result.sectors++;
        } else {
            s64 at = (s64)(u32)base + it->offset;
            if (!check_shared(block, number, at, bytes, is_load ? READ : WRITE, new, it->line)) return;
            memory = block->shared + at;
        }
        if (!is_load) {
            memcpy(memory, buffer, (size_t)bytes);
            continue;
        }
        for (int k = 0; k < it->count; k++) {
            u64 loaded = 0;
            memcpy(&loaded, memory + k * it->bytes, (size_t)it->bytes);
            warp->registers[it->destination[k]][i] = loaded;
        }
    }
}

static void change_atomically(Block *block, int number, const Instruction *it, u32 active) {
    Warp *warp = &block->warps[number];
    result.atomics++;
    for (int i = 0; i < LANES; i++) {
        if (!(active >> i & 1)) continue;
        u64 address = warp->registers[it->base][i] + (u64)it->offset;
        int bytes = it->operation == DO_atom_add_u64 ? 8 : 4;
        if (!check_global(block, number, address, bytes, ATOMIC, NULL, it->line)) return;
        if (bytes == 8) {
            u64 *wide = (u64 *)address, before = *wide;
            *wide += warp->registers[it->source[0]][i];
            warp->registers[it->destination[0]][i] = before;
            continue;
        }
        u32 *memory = (u32 *)address, old = *memory;
        u32 x = (u32)warp->registers[it->source[0]][i];
        switch (it->operation) {
        case DO_atom_max_s32: *memory = (s32)old > (s32)x ? old : x; break;
        case DO_atom_min_s32: *memory = (s32)old < (s32)x ? old : x; break;
        case DO_atom_or_b32: *memory = old | x; break;
        case DO_atom_and_b32: *memory = old & x; break;
        case DO_atom_add_u32: *memory = old + x; break;
        default: *memory = x;
        }
        warp->registers[it->destination[0]][i] = old;
    }
}

/* Exchanges numbers between the lanes of a warp. */
static void exchange(Warp *warp, const Instruction *it) {
    u64 *to = warp->registers[it->destination[0]], from[LANES];
    memcpy(from, warp->registers[it->source[0]], sizeof from);
    const u64 *by = warp->registers[it->source[1]];
    u32 total = (u32)from[0];
    for (int i = 1; i < LANES; i++) {
        u32 x = (u32)from[i];
        switch (it->operation) {
        case DO_redux_max_s32: total = (s32)x > (s32)total ? x : total; break;
        case DO_redux_min_s32: total = (s32)x < (s32)total ? x : total; break;
        case DO_redux_max_u32: total = x > total ? x : total; break;
        case DO_redux_min_u32: total = x < total ? x : total; break;
        case DO_redux_add_s32: total += x; break;
        }
    }
    for (int i = 0; i < LANES; i++) {
        switch (it->operation) {
        case DO_shfl_bfly: to[i] = (u32)from[(i ^ (int)by[i]) & 31]; break;
        case DO_shfl_idx: to[i] = (u32)from[by[i] & 31]; break;
        default: to[i] = total;
        }
    }
}

/* Loads matrices of 8 x 8 numbers of 16 bits: lane 8 * k + r has the address of row r of number k. */
static void load_matrices(Block *block, int number, const Instruction *it) {
    Warp *warp = &block->warps[number];
    int is_transposed = it->operation == DO_ldmatrix_trans;
    for (int k = 0; k < it->count; k++) {
        for (int row = 0; row < 8; row++) {
            s64 at = (s64)(u32)warp->registers[it->base][8 * k + row] + it->offset;
            if (!check_shared(block, number, at, 16, READ, NULL, it->line)) return;
            for (int column = 0; column < 8; column++) {
                u16 x;
                memcpy(&x, block->shared + at + 2 * column, 2);
                int r = is_transposed ? column : row, c = is_transposed ? row : column;
                u64 *lane = &warp->registers[it->source[k]][4 * r + c / 2];
                *lane = c % 2 ? (*lane & 0xFFFF) | (u32)x << 16 : x;
            }
        }
    }
}

/* Stores them: the inverse. */
static void store_matrices(Block *block, int number, const Instruction *it) {
    Warp *warp = &block->warps[number];
    int is_transposed = it->operation == DO_stmatrix_trans;
    for (int k = 0; k < it->count; k++) {
        for (int row = 0; row < 8; row++) {
            u16 buffer[8];
            for (int column = 0; column < 8; column++) {
                int r = is_transposed ? column : row, c = is_transposed ? row : column;
                buffer[column] = (u16)(warp->registers[it->source[k]][4 * r + c / 2] >> 16 * (c % 2));
            }
            s64 at = (s64)(u32)warp->registers[it->base][8 * k + row] + it->offset;
            if (!check_shared(block, number, at, 16, WRITE, (const u8 *)buffer, it->line)) return;
            memcpy(block->shared + at, buffer, 16);
        }
    }
}

/* Executes an instruction for the active lanes, all of which are at it. */
static void execute(Block *block, int number, const Instruction *it, u32 lanes) {
    Warp *warp = &block->warps[number];
    u32 active = lanes;
    if (it->guard >= 0) {
        const u64 *guard = warp->registers[it->guard];
        for (int i = 0; i < LANES; i++)
            if ((int)(guard[i] & 1) == it->negated) active &= ~(1u << i);
    }
    steps++, result.instructions++, warp->instructions++;
    if (it->operation >= DO_shfl_bfly && (lanes != ALL || it->guard >= 0)) {
        fail(DIVERGED, 0, it->line, 0);
        return;
    }
    u64 *d = warp->registers[it->destination[0]];
    const u64 *x = warp->registers[it->source[0]], *y = warp->registers[it->source[1]];
    const u64 *z = warp->registers[it->source[2]];
    switch (it->operation) {
#define ALU(name, expression) \
    case DO_##name: \
        for (int i = 0; i < LANES; i++) { \
            u64 a = x[i], b = y[i], c = z[i], was = d[i]; \
            (void)a, (void)b, (void)c; \
            u64 now = (u64)(expression); \
            d[i] = active >> i & 1 ? now : was; \
        } \
        break;
        ALUS
#undef ALU
    case DO_join:
        for (int i = 0; i < LANES; i++) {
            u64 joined = 0;
            for (int k = it->count - 1; k >= 0; k--) {
                u64 part = warp->registers[it->source[k]][i] & ((1ull << 8 * it->bytes) - 1);
                joined = joined << 8 * it->bytes | part;
            }
            if (active >> i & 1) d[i] = joined;
        }
        break;
    case DO_part:
        for (int k = 0; k < it->count; k++)
            for (int i = 0; i < LANES; i++)
                if (active >> i & 1)
                    warp->registers[it->destination[k]][i] =
                        x[i] >> 8 * it->bytes * k & ((1ull << 8 * it->bytes) - 1);
        break;
    case DO_branch:
        for (int i = 0; i < LANES; i++)
            if (active >> i & 1) warp->pc[i] = (u32)it->target;
        break;
    case DO_ret: warp->live &= ~active; break;
    case DO_nop: break;
    case DO_bar_sync:
        if (active != warp->live) fail(DIVERGED, 0, it->line, 0);
        warp->waiting = active, result.barriers++;
        break;
    case DO_ld_global:
    case DO_st_global:
    case DO_ld_shared:
    case DO_st_shared: access_memory(block, number, it, active); break;
    case DO_ldmatrix:
    case DO_ldmatrix_trans: load_matrices(block, number, it); break;
    case DO_stmatrix:
    case DO_stmatrix_trans: store_matrices(block, number, it); break;
    default:
        if (it->operation >= DO_shfl_bfly) exchange(warp, it);
        else change_atomically(block, number, it, active);
    }
}

static Block *begin_block(u64 program) {
    Block *block = calloc(1, sizeof *block);
    block->program = program;
    block->shared = malloc((size_t)job->shared_bytes + 1);
    memset(block->shared, 0xAB, (size_t)job->shared_bytes);
    block->shared_records = calloc((size_t)job->shared_bytes + 1, sizeof(Record));
    u32 place[] = {
        (u32)(program % job->grid[0]), (u32)(program / job->grid[0] % job->grid[1]),
        (u32)(program / job->grid[0] / job->grid[1]),
    };
    for (int w = 0; w < job->warps; w++) {
        Warp *warp = &block->warps[w];
        warp->live = ALL;
        warp->registers = malloc((size_t)job->registers * sizeof *warp->registers);
        /* What a kernel reads before it writes is not zero by chance. */
        memset(warp->registers, 0xCD, (size_t)job->registers * sizeof *warp->registers);
        u64(*fixed)[LANES] = warp->registers + (job->registers - job->fixed);
        for (int i = 0; i < LANES; i++) {
            fixed[0][i] = (u64)(w * LANES + i);
            for (int k = 0; k < 3; k++) fixed[1 + k][i] = place[k], fixed[4 + k][i] = job->grid[k];
            for (int k = 7; k < job->fixed; k++) fixed[k][i] = job->values[k - 7];
        }
    }
    return block;
}

static void end_block(Block *block) {
    for (int w = 0; w < job->warps; w++) {
        Warp *warp = &block->warps[w];
        if (warp->instructions > result.longest_warp) {
            result.longest_warp = warp->instructions;
            result.longest_loads = warp->loads;
            result.longest_program = block->program;
        }
        free(warp->registers);
    }
    free(block->shared), free(block->shared_records), free(block);
}

static void set_pc(Warp *warp, u32 lanes, u32 pc) {
    for (int i = 0; i < LANES; i++)
        if (lanes >> i & 1) warp->pc[i] = pc;
}

/* Executes up to `most` instructions of a warp; 0 if all its lanes wait or have returned. */
static int advance(Block *block, int number, int most) {
    Warp *warp = &block->warps[number];
    int executed = 0;
    while (executed < most && !result.fault) {
        u32 runnable = warp->live & ~warp->waiting, least = ~0u, next = ~0u, lanes = 0;
        if (!runnable) break;
        for (int i = 0; i < LANES; i++) {
            if (!(runnable >> i & 1)) continue;
            u32 pc = warp->pc[i];
            if (pc < least) next = least, least = pc, lanes = 0;
            if (pc == least) lanes |= 1u << i;
            else if (pc < next) next = pc;
        }
        /* The lanes that are first go on until they branch, or meet those that are next. */
        int has_branched = 0;
        while (executed < most && !result.fault && !has_branched && least != next) {
            if (least >= (u32)job->length) {
                fail(STUCK, 0, 0, 0);
                break;
            }
            const Instruction *it = &job->code[least++];
            has_branched = it->operation >= DO_branch && it->operation <= DO_bar_sync;
            if (has_branched) set_pc(warp, lanes, least);
            execute(block, number, it, lanes);
            executed++;
        }
        if (!has_branched) set_pc(warp, lanes, least);
    }
    return executed;
}

/* Whether a block in which nothing can be executed is done; else all its lanes have met. */
static int is_done(Block *block) {
    u32 live = 0;
    for (int w = 0; w < job->warps; w++) live |= block->warps[w].live, block->warps[w].waiting = 0;
    block->epoch++;
    return !live;
}

int run(const Job *given, u64 most_instructions, Result *found) {
    job = given;
    memset(&result, 0, sizeof result);
    steps = 0, random_state = given->seed * 2862933555777941757ull + 3037000493ull;
    records = calloc((size_t)job->range_count + 1, sizeof *records);
    if (job->finds_races)
        for (int i = 0; i < job->range_count; i++) {
            const Range *range = &job->ranges[i];
            records[i] = calloc((range->end - range->begin) / range->element + 1, sizeof(Record));
        }
    u64 *order = malloc((job->programs + 1) * sizeof *order), next = 0;
    for (u64 i = 0; i < job->programs; i++) order[i] = job->first_program + i;
    for (u64 i = job->programs; i-- > 1;) {
        u64 other = draw(i + 1), kept = order[i];
        order[i] = order[other], order[other] = kept;
    }
    Block *blocks[MOST_RESIDENT];
    int count = 0;
    while (!result.fault) {
        while (count < job->resident && next < job->programs) blocks[count++] = begin_block(order[next++]);
        if (!count) break;
        int chosen = (int)draw((u64)count), executed = 0;
        int first = (int)draw((u64)job->warps), most = 1 + (int)draw(64);
        for (int w = 0; w < job->warps && !executed; w++)
            executed = advance(blocks[chosen], (first + w) % job->warps, most);
        if (!executed && is_done(blocks[chosen])) {
            end_block(blocks[chosen]);
            blocks[chosen] = blocks[--count];
        }
        if (result.instructions > most_instructions) fail(TOO_LONG, 0, 0, 0);
    }
    while (count) end_block(blocks[--count]);
    for (int i = 0; i < job->range_count; i++) free(records[i]);
    free(records), free(order);
    *found = result;
    return (int)result.fault;
}
