// Every load and store of a kernel is looked at here, before it happens.
//
// The kernels are compiled with -fsanitize=thread and -fsanitize=bounds, but the libraries of these sanitizers are not linked:
// the calls that the compiler puts before each access (__tsan_read4, ...) land in the functions at the end of this file. For
// every few bytes of memory a Cell remembers who touched them last, and when. Two accesses are ordered if a barrier lies
// between them; if none does, and one of them stores, they may happen in either order: a race, in whichever order they ran today.
#include "runtime.h"
#include <algorithm>
#include <cstdio>
#include <cstring>
#include <map>
#include <sys/mman.h>
#include <unordered_map>

namespace cpu {

// ---- what is remembered of memory ---------------------------------------------------------------------------------------------
struct Access {
    uint32_t epoch, step;                       // block barriers, and this thread's warp barriers, before it; epoch 0: no access
    uint32_t place;
    uint16_t thread;
    Kind kind;
    int warp() const { return thread / 32; }
};
struct Cell { Access stored, read, read_before, read_elsewhere; };      // the last; of another lane; of another warp or block

struct Region {                                 // a piece of memory that kernels may use
    enum Type { GLOBAL, DYNAMIC, STATIC } type;
    uintptr_t from, to, origin;                 // origin: where the pointer that the kernel got points to
    const char* name;
    unsigned element_bytes;
    bool writable;
    const unsigned char* inside;                // for arrays with gaps, which bytes belong to them; null: all
    unsigned cell_bytes;
    Cell* cells;

    bool holds(uintptr_t a, unsigned bytes) const {
        return a >= from && a + bytes <= to && (!inside || (inside[a - from] && inside[a - from + bytes - 1]));
    }
    size_t memory() const { return ((to - from) / cell_bytes + 2) * sizeof(Cell); }
    void allocate() {
        void* p = mmap(nullptr, memory(), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        cells = p == MAP_FAILED ? nullptr : static_cast<Cell*>(p);
    }
    void free() { if (cells) munmap(cells, memory()); cells = nullptr; }
    // Accesses narrower than a cell: from now on there are more cells. What was known of the wide ones holds for their parts.
    void split(unsigned bytes) {
        Region old = *this;
        cell_bytes = bytes;
        allocate();
        if (cells) for (size_t i = 0; i < (to - from) / bytes; ++i) cells[i] = old.cells[i * bytes / old.cell_bytes];
        old.free();
    }
};
static std::vector<Region> regions;             // by address
static size_t latest_region;

static void add_region(Region::Type type, uintptr_t from, size_t bytes, const char* name) {
    regions.push_back({type, from, from + bytes, from, name, 1, true, nullptr, 4, nullptr});
}
static void collect_regions() {
    regions.clear();
    latest_region = 0;
    for (unsigned i = 0; i < launch->array_count; ++i) {
        const Array& a = launch->arrays[i];
        regions.push_back({Region::GLOBAL, a.from, a.from + a.bytes, a.origin, a.name, a.element_bytes, a.writable != 0, a.inside,
                           std::min(4u, a.element_bytes), nullptr});
    }
    add_region(Region::DYNAMIC, (uintptr_t)arena + FENCE_BYTES, launch->shared_bytes, "");
    for (unsigned i = 0; i < launch->variable_count; ++i)
        add_region(Region::STATIC, (uintptr_t)static_shared.from + launch->variables[i].offset, launch->variables[i].bytes, launch->variables[i].name);
    std::sort(regions.begin(), regions.end(), [](const Region& a, const Region& b) { return a.from < b.from; });
}
static Region* region_of(uintptr_t a, unsigned bytes) {
    if (latest_region < regions.size() && regions[latest_region].holds(a, bytes)) return &regions[latest_region];
    auto next = std::upper_bound(regions.begin(), regions.end(), a, [](uintptr_t x, const Region& r) { return x < r.from; });
    while (next != regions.begin()) {           // (empty regions may share an address with the one that is meant)
        --next;
        if (next->holds(a, bytes)) { latest_region = next - regions.begin(); return &*next; }
        if (next->to > next->from) break;
    }
    return nullptr;
}
static Region* nearest_region(uintptr_t a) {
    Region* best = nullptr;
    size_t least = SIZE_MAX;
    for (Region& r : regions) {
        size_t distance = a < r.from ? r.from - a : a >= r.to ? a - r.to : 0;
        if (distance < least) { least = distance; best = &r; }
    }
    return least < 48 << 10 ? best : nullptr;
}

// ---- words ------------------------------------------------------------------------------------------------------------------------
static const char* verb(Kind kind) {
    static const char* const verbs[] = {"load", "store", "atomic operation", "copy in the background", "copy in the background"};
    return verbs[kind];
}
static std::string name_of(const Region& r, uintptr_t a) {
    const long long offset = (long long)a - (long long)r.origin;
    if (r.type == Region::GLOBAL) return std::string("`") + r.name + "[" + std::to_string(offset / (int)r.element_bytes) + "]`";
    if (r.type == Region::STATIC) return std::string("shared `") + r.name + "`, byte " + std::to_string(offset);
    return "dynamic shared memory, byte " + std::to_string(offset);
}
static std::string extent_of(const Region& r) {
    const size_t bytes = r.to - r.from;
    if (r.inside && r.type == Region::GLOBAL) return std::string("`") + r.name + "` is a view with gaps, and nothing of it lies there";
    if (r.type == Region::GLOBAL) {
        const size_t n = bytes / r.element_bytes, before = (r.origin - r.from) / r.element_bytes;
        if (!n) return std::string("`") + r.name + "` is empty";
        return std::string("`") + r.name + "` ends at [" + std::to_string((long long)(n - before) - 1) + "]" +
               (before ? " and begins at [-" + std::to_string(before) + "]" : "");
    }
    if (r.type == Region::STATIC) return std::string("`") + r.name + "` has " + std::to_string(bytes) + " bytes";
    return "the launch asked for shared_mem=" + std::to_string(bytes);
}

// ---- the questions -------------------------------------------------------------------------------------------------------------------
static bool shared(const Region& r) { return r.type != Region::GLOBAL; }
// Of an earlier block's access to shared memory nothing is left; to global memory it may happen now as well.
static bool forgotten(const Region& r, const Access& a) { return !a.epoch || (shared(r) && a.epoch < block_epoch); }
static bool unordered(const Region& r, const Access& a, Kind mine) {
    if (forgotten(r, a) || (a.kind == ATOMIC && mine == ATOMIC)) return false;
    if (a.epoch < block_epoch) return true;
    if (a.thread == me->number || a.epoch != epoch) return false;
    return a.warp() != me->warp() || a.step > me->seen[a.thread % 32];
}
static void report_race(const Region& r, uintptr_t at, Kind kind, const Access& other, Place place) {
    const bool blocks = other.epoch < block_epoch;
    const bool warps = other.warp() != me->warp();
    const char* remedy = blocks ? "Blocks run in any order or together: no two may touch the same element unless all only read it, or all use atomics"
                         : warps ? "Warps run in any order: put __syncthreads() between"
                         : "Lanes of a warp may run one after the other: put __syncwarp() (or __syncthreads()) between";
    complain(blocks ? "race between blocks" : warps ? "race between warps" : "race in a warp", place, other.place, "race on %s: this %s, and the %s %s thread %d at {there}. %s", name_of(r, at).c_str(), verb(kind),
             verb(other.kind), blocks ? "of another block's" : "by", other.thread, remedy);
}
static void remember_read(const Region& r, Cell& cell, const Access& mine) {
    Access& last = cell.read;
    const bool same_group = last.epoch == epoch && last.warp() == me->warp();
    if (same_group) {
        if (last.thread != me->number) cell.read_before = last;
    } else {
        const bool matters = last.epoch == epoch || (!shared(r) && last.epoch && last.epoch < block_epoch);
        if (matters) cell.read_elsewhere = last;
        cell.read_before = Access();
    }
    last = mine;
}
// Memory that begins as cpu_emulator.uninitialised() or as poisoned shared memory, and that nobody has stored to since.
static bool unset(const Region& r, const Cell& cell, uintptr_t at, unsigned bytes) {
    if (shared(r)) return forgotten(r, cell.stored);
    if (cell.stored.epoch) return false;
    if (bytes == 1) { at &= ~uintptr_t(3); bytes = 4; }                 // one byte alone could well be equal by chance
    if (at % 2 || !r.holds(at, bytes)) return false;
    for (unsigned i = 0; i < bytes; i += 2) if (memcmp((void*)(at + i), POISON, 2)) return false;
    return true;
}
static void check_cell(Region& r, Cell& cell, uintptr_t at, unsigned bytes, Kind kind, Place place) {
    const Access mine{epoch, me->step(), uint32_t(place), uint16_t(me->number), kind};
    const Access& stored = cell.stored;
    const bool filling = stored.kind == COPY && !forgotten(r, stored);
    if (filling && kind != COPY && kind != LANDED)
        complain("copy", place, stored.place, "%s of %s, which the copy started by thread %d at {there} still fills: the copy must be committed and waited for "
                 "(copy_wait), and a barrier must follow", verb(kind), name_of(r, at).c_str(), stored.thread);
    else if (unordered(r, stored, kind)) report_race(r, at, kind, stored, place);
    else if ((kind == LOAD || kind == ATOMIC) && unset(r, cell, at, bytes))
        complain("uninitialised", place, 0, "%s of %s, which nobody has set%s", verb(kind), name_of(r, at).c_str(), shared(r) ? " in this block" : "");
    if (kind == LOAD) return remember_read(r, cell, mine);
    for (const Access* read : {&cell.read, &cell.read_before, &cell.read_elsewhere})
        if (unordered(r, *read, kind)) { report_race(r, at, kind, *read, place); break; }
    cell.stored = mine;
}

// ---- accesses that no region holds ------------------------------------------------------------------------------------------------------
static void outside(uintptr_t a, unsigned bytes, Kind kind, Place place) {
    if (in_stack_of(*me, a)) return;            // a thread's own variables
    if (a >= (uintptr_t)module.from && a < (uintptr_t)module.from + module.bytes) {
        if (kind == LOAD) return;               // constants
        complain("out of bounds", place, 0, "%s to a variable of the module (`__device__` or `static`): this emulator has only arrays that are passed, and constants", verb(kind));
        abandon();
    }
    const Region* near = nearest_region(a);
    if (a < 65536) complain("out of bounds", place, 0, "%s through a null pointer (was None passed for it?)", verb(kind));
    else if (near) complain("out of bounds", place, 0, "%s of %u bytes at %s, but %s", verb(kind), bytes, name_of(*near, a).c_str(), extent_of(*near).c_str());
    else complain("out of bounds", place, 0, "%s far outside of all arrays and of shared memory: a wild pointer or index, or another thread's local variable", verb(kind));
    abandon();
}

// ---- how well accesses go together -------------------------------------------------------------------------------------------------------
// The k-th execution of one instruction by the lanes of a warp is one request. Shared memory serves it in as many passes as
// the worst of the 32 banks (4 bytes wide) has different words to give; global memory in sectors of 32 bytes.
struct Traffic { long requests = 0, passes = 0, ideal = 0; unsigned bytes = 0; bool store = false, global = false; };
struct Instruction { Traffic traffic; std::vector<int> executions; std::map<std::pair<int, int>, std::vector<uintptr_t>> open; };
static std::unordered_map<Place, Instruction> instructions;
static std::string traffic_text;

static size_t different(std::vector<uintptr_t>& values) {
    std::sort(values.begin(), values.end());
    return std::unique(values.begin(), values.end()) - values.begin();
}
static void count_global(Traffic& t, std::vector<uintptr_t>& addresses) {
    std::vector<uintptr_t> sectors;
    for (uintptr_t a : addresses) for (uintptr_t s = a / 32; s <= (a + t.bytes - 1) / 32; ++s) sectors.push_back(s);
    t.passes += different(sectors);
    t.ideal += (different(addresses) * t.bytes + 31) / 32;
}
static void count_shared(Traffic& t, std::vector<uintptr_t>& addresses) {
    const unsigned words = std::max(t.bytes, 4u) / 4, lanes = 32 / words;       // 128 bytes at most in a pass: 8 lanes of 16 bytes
    for (size_t i = 0; i < addresses.size(); i += lanes) {
        std::vector<uintptr_t> bank[32];
        for (size_t j = i; j < std::min(i + lanes, addresses.size()); ++j)
            for (unsigned k = 0; k < words; ++k) bank[(addresses[j] / 4 + k) % 32].push_back(addresses[j] / 4 + k);
        size_t worst = 0;
        for (auto& b : bank) worst = std::max(worst, different(b));
        t.passes += worst;
        t.ideal += 1;
    }
}
static void close_request(Traffic& t, std::vector<uintptr_t>& addresses) {
    ++t.requests;
    t.global ? count_global(t, addresses) : count_shared(t, addresses);
}
static void count(const Region& r, uintptr_t a, unsigned bytes, Kind kind, Place place) {
    Instruction& i = instructions[place];
    if (i.executions.empty()) i.executions.assign(1024, 0);
    i.traffic.bytes = bytes;
    i.traffic.store = kind != LOAD;
    i.traffic.global = !shared(r);
    auto request = std::make_pair(me->warp(), i.executions[me->number]++);
    auto& addresses = i.open[request];
    addresses.push_back(shared(r) ? a - (r.type == Region::DYNAMIC ? (uintptr_t)arena + FENCE_BYTES : (uintptr_t)static_shared.from) : a);
    if (addresses.size() == 32) { close_request(i.traffic, addresses); i.open.erase(request); }
}
void checker_end_block() {
    for (auto& [place, i] : instructions) {
        for (auto& [request, addresses] : i.open) close_request(i.traffic, addresses);
        i.open.clear();
        i.executions.assign(1024, 0);
    }
}

// ---- the entrance ---------------------------------------------------------------------------------------------------------------------------
void check(const void* p, unsigned bytes, Kind kind, Place place, bool aligned) {
    if (!me || !launch->checked) return;
    Busy busy;
    const uintptr_t a = (uintptr_t)p;
    Region* r = region_of(a, bytes);
    if (!r) return outside(a, bytes, kind, place);
    if (aligned && a % bytes) {
        complain("misaligned", place, 0, "%s of %u bytes at %s, whose address is no multiple of %u", verb(kind), bytes, name_of(*r, a).c_str(), bytes);
        abandon();
    }
    if (kind != LOAD && !r->writable) {
        complain("read-only", place, 0, "%s to %s, which was passed for a pointer to const", verb(kind), name_of(*r, a).c_str());
        abandon();
    }
    if (launch->counting && kind != COPY && kind != LANDED) count(*r, a, bytes, kind, place);
    if (!r->cells) r->allocate();
    if (bytes < r->cell_bytes) r->split(bytes);
    if (!r->cells) { complain("memory", place, 0, "not enough memory to check accesses to this array: run it with check=False"); abandon(); }
    const size_t first = (a - r->from) / r->cell_bytes, last = (a + bytes - 1 - r->from) / r->cell_bytes;
    for (size_t i = first; i <= last; ++i)
        check_cell(*r, r->cells[i], r->from + i * r->cell_bytes, std::min(bytes, r->cell_bytes), kind, place);
}
void checker_begin() {
    instructions.clear();
    if (launch->checked) collect_regions();
}
void checker_end() {
    for (Region& r : regions) r.free();
    regions.clear();
    traffic_text.clear();
    for (auto& [place, i] : instructions) {
        const Traffic& t = i.traffic;
        char line[200];
        snprintf(line, sizeof line, "%lld\t%d\t%d\t%u\t%ld\t%ld\t%ld\n", (long long)place, t.global, t.store, t.bytes, t.requests, t.passes, t.ideal);
        traffic_text += line;
    }
}

// ---- what the compiler's array bounds and integer arithmetic checks call: they give the line themselves ------------------------------------------
struct Source { const char* file; uint32_t line, column; };
struct TypeName { uint16_t kind, info; char name[1]; };                 // name: 'float [4]'
static long long value_of(const TypeName& type, uintptr_t value) {
    const unsigned bits = 1u << (type.info >> 1);
    if (!(type.info & 1) || bits >= 64) return value;
    return (long long)(value << (64 - bits)) >> (64 - bits);
}
static void overflow(const Source& at, const TypeName& type, const char* sign, uintptr_t a, uintptr_t b) {
    complain("arithmetic", -Place(at.line), 0, "%lld %s %lld does not fit into %s: large index computations need long long", value_of(type, a), sign,
             value_of(type, b), type.name);
}
}  // namespace cpu

using namespace cpu;
#pragma GCC visibility push(hidden)
extern "C" {
const char* emulator_traffic() __attribute__((visibility("default")));
const char* emulator_traffic() { return traffic_text.c_str(); }

struct OutOfBounds { Source at; const TypeName *array, *index; };
struct Overflow { Source at; const TypeName* type; };
void __ubsan_handle_out_of_bounds(OutOfBounds* what, uintptr_t index) {
    complain("out of bounds", -Place(what->at.line), 0, "index %lld of an array of type %s", value_of(*what->index, index), what->array->name);
    abandon();
}
void __ubsan_handle_add_overflow(Overflow* what, uintptr_t a, uintptr_t b) { overflow(what->at, *what->type, "+", a, b); }
void __ubsan_handle_sub_overflow(Overflow* what, uintptr_t a, uintptr_t b) { overflow(what->at, *what->type, "-", a, b); }
void __ubsan_handle_mul_overflow(Overflow* what, uintptr_t a, uintptr_t b) { overflow(what->at, *what->type, "*", a, b); }
void __ubsan_handle_negate_overflow(Overflow* what, uintptr_t a) { overflow(what->at, *what->type, "-", 0, a); }
void __ubsan_handle_divrem_overflow(Overflow* what, uintptr_t a, uintptr_t b) {
    if (value_of(*what->type, b) != 0) return overflow(what->at, *what->type, "/", a, b);
    complain("arithmetic", -Place(what->at.line), 0, "an integer is divided by zero");
    abandon();
}

void __tsan_init() {}
void __tsan_func_entry(void*) {}
void __tsan_func_exit() {}
#define ACCESSES(n)                                                                        \
    void __tsan_read##n(void* p) { check(p, n, LOAD, HERE); }                              \
    void __tsan_write##n(void* p) { check(p, n, STORE, HERE); }                            \
    void __tsan_unaligned_read##n(void* p) { check(p, n, LOAD, HERE, false); }             \
    void __tsan_unaligned_write##n(void* p) { check(p, n, STORE, HERE, false); }           \
    void __tsan_volatile_read##n(void* p) { check(p, n, LOAD, HERE); }                     \
    void __tsan_volatile_write##n(void* p) { check(p, n, STORE, HERE); }
ACCESSES(1)
ACCESSES(2)
ACCESSES(4)
ACCESSES(8)
ACCESSES(16)
void __tsan_vptr_read(void** p) { check(p, sizeof *p, LOAD, HERE); }             // of an object with virtual functions
void __tsan_vptr_update(void** p, void*) { check(p, sizeof *p, STORE, HERE); }
void __tsan_read_range(void* p, size_t n) { for (size_t i = 0; i < n; i += 4) check((char*)p + i, std::min<size_t>(4, n - i), LOAD, HERE, false); }
void __tsan_write_range(void* p, size_t n) { for (size_t i = 0; i < n; i += 4) check((char*)p + i, std::min<size_t>(4, n - i), STORE, HERE, false); }
}
#pragma GCC visibility pop
