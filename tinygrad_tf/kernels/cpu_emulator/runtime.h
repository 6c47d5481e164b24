// What the scheduler and the checker of the emulator share, and how Python talks to them. Kernels do not see this file.
#pragma once
#include <cstddef>
#include <cstdint>
#include <memory>
#include <random>
#include <string>
#include <ucontext.h>
#include <vector>

struct uint3 { unsigned x, y, z; };
struct dim3 { unsigned x, y, z; };
extern uint3 threadIdx, blockIdx;
extern dim3 blockDim, gridDim;

namespace cpu {

// ---- from Python: one launch; module.py and arguments.py have the same structures ----------------------------------------------------------
struct Array { uintptr_t from, bytes, origin; const char* name; const unsigned char* inside; unsigned element_bytes, writable; };
struct Variable { uintptr_t offset, bytes; const char* name; };         // of static shared memory, within the thread-local block
typedef void (*Body)(void** arguments);
struct Launch {
    Body body; void** arguments;
    unsigned grid[3], block[3];
    unsigned shared_bytes, seed, checked, counting;
    double seconds;
    unsigned array_count, variable_count;
    const Array* arrays; const Variable* variables;
};

// ---- a CUDA thread --------------------------------------------------------------------------------------------------------
struct Copy { unsigned char* to; const unsigned char* from; bool there; int64_t place; };
constexpr unsigned MAIL_BYTES = 48;
struct Mail { unsigned lanes; unsigned char box[32][MAIL_BYTES]; };     // what each lane brought to a warp operation
struct Fiber {
    enum State { READY, AT_BARRIER, AT_WARP_OPERATION, DONE } state;
    ucontext_t context;
    uint3 index;
    int number;
    // where it waits
    int line;
    const char* operation;
    unsigned mask;
    bool orders, whole_warp;
    unsigned char mail[MAIL_BYTES];
    unsigned mail_bytes;
    std::shared_ptr<Mail> received;
    int vote;
    // what it knows: of each lane of its warp, up to which of that lane's steps memory is settled
    uint32_t seen[32];
    std::vector<std::vector<Copy>> copies;                              // groups under way, oldest first; the last is still open

    int lane() const { return number % 32; }
    int warp() const { return number / 32; }
    uint32_t step() const { return seen[lane()]; }                      // counts this thread's __syncwarp
};

extern Launch* launch;
extern Fiber* me;                               // the thread that runs; null while the scheduler itself does
extern uint32_t epoch, block_epoch;             // block barriers so far in this launch; at the start of this block

// ---- faults ---------------------------------------------------------------------------------------------------------------
// `place` of a fault: an address of the module's code (Python looks up its line), or -line where that is known.
typedef int64_t Place;
void complain(const char* kind, Place at, Place other, const char* format, ...) __attribute__((format(printf, 4, 5)));
[[noreturn]] void abandon();                    // an illegal access ends the launch, as on a GPU
struct Busy {                                   // while one lives, the clock does not interrupt: the runtime's own data are in change
    Busy() { ++depth; }
    ~Busy() { --depth; }
    static volatile int depth;
};

// ---- memory ---------------------------------------------------------------------------------------------------------------
struct Memory { unsigned char* from; size_t bytes; };
extern Memory static_shared, module;            // all __shared__ variables of the module; its code and constants
extern unsigned char *arena, *stacks;           // dynamic shared memory between two fences; the fibers' stacks
constexpr size_t SHARED_BYTES = 227 << 10, FENCE_BYTES = 4 << 10, STACK_BYTES = 256 << 10, GUARD_BYTES = 64 << 10;
constexpr unsigned char POISON[2] = {0xf5, 0x7f};                       // NaN in float16, bfloat16, float32 and float64
bool in_stack_of(const Fiber& fiber, uintptr_t address);

// ---- the checker ----------------------------------------------------------------------------------------------------------
enum Kind : uint8_t { LOAD, STORE, ATOMIC, COPY, LANDED };              // COPY: cp.async has begun; LANDED: what it brings is there
void checker_begin();
void checker_end();
void checker_end_block();
inline Place place_of(uintptr_t return_address) { return return_address - (uintptr_t)module.from - 1; }     // the call itself
void check(const void* p, unsigned bytes, Kind kind, Place place, bool aligned = true);
#define HERE place_of((uintptr_t)__builtin_extract_return_addr(__builtin_return_address(0)))

// ---- from the scheduler, for instructions.cpp; kernels have these from cuda_on_cpu.h --------------------------------------------
void exchange(int line, const char* operation, unsigned mask, const void* mail, unsigned bytes, bool orders = false, bool whole_warp = false);
const void* mail_from(int lane);

}  // namespace cpu
