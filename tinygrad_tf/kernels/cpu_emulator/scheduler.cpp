// Blocks one after the other; in a block every CUDA thread is a fiber. A round lets each fiber that is ready run until it
// waits (for a barrier or for lanes of its warp) or ends; then those whose companions have all arrived are set free.
#include "runtime.h"
#include <algorithm>
#include <cassert>
#include <csignal>
#include <cstdarg>
#include <cstdio>
#include <cstring>
#include <ctime>
#include <link.h>
#include <map>
#include <numeric>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <tuple>
#include <unistd.h>

uint3 threadIdx, blockIdx;
dim3 blockDim, gridDim;

namespace cpu {

Launch* launch;
Fiber* me;
uint32_t epoch, block_epoch;
unsigned char *arena, *stacks;
Memory static_shared, module;
volatile int Busy::depth;

static std::vector<Fiber> fibers;
static ucontext_t scheduler;
static bool abandoned;
static std::mt19937 random_numbers;
static std::string printed;

// ---- faults: one line each, tab-separated; Python turns places into lines of the source -------------------------------------
struct Fault { uint3 block; int thread; long times; std::string text; };
static std::map<std::tuple<std::string, Place, Place>, size_t> known;   // the same fault again is only counted
static std::vector<std::pair<std::tuple<std::string, Place, Place>, Fault>> faults;
static std::string report;
constexpr size_t ENOUGH = 16;

void complain(const char* kind, Place at, Place other, const char* format, ...) {
    Busy busy;
    auto key = std::make_tuple(std::string(kind), at, other);
    auto found = known.find(key);
    if (found != known.end()) { ++faults[found->second].second.times; return; }
    char text[600];
    va_list values;
    va_start(values, format);
    vsnprintf(text, sizeof text, format, values);
    va_end(values);
    known[key] = faults.size();
    faults.push_back({key, {blockIdx, me ? me->number : -1, 1, text}});
}

static void write_report() {
    report.clear();
    for (auto& [key, fault] : faults) {
        auto& [kind, at, other] = key;
        char head[200];
        snprintf(head, sizeof head, "%s\t%lld\t%lld\t%u,%u,%u\t%d\t%ld\t", kind.c_str(), (long long)at, (long long)other,
                 fault.block.x, fault.block.y, fault.block.z, fault.thread, fault.times);
        report += head + fault.text + "\n";
    }
}

void abandon() {
    abandoned = true;
    me->state = Fiber::DONE;
    me = nullptr;
    setcontext(&scheduler);
    __builtin_unreachable();
}
void failed(int line, const char* what) {
    complain("stopped", -line, 0, "%s", what);
    abandon();
}

// ---- in the fiber: waiting ----------------------------------------------------------------------------------------------------
static void wait(Fiber::State state, int line, const char* operation) {
    me->state = state;
    me->line = line;
    me->operation = operation;
    swapcontext(&me->context, &scheduler);
}
void block_barrier(int line) {
    Busy busy;
    wait(Fiber::AT_BARRIER, line, "__syncthreads");
}
int block_vote(int line, int predicate, char how) {
    me->vote = predicate != 0;
    block_barrier(line);
    int yes = me->vote;                         // release_barrier has left the number of votes here
    return how == 'c' ? yes : how == 'a' ? yes == int(fibers.size()) : yes > 0;
}
void exchange(int line, const char* operation, unsigned mask, const void* mail, unsigned bytes, bool orders, bool whole_warp) {
    Busy busy;
    if (!(mask >> me->lane() & 1)) complain("mask", -line, 0, "%s: lane %d is not in its own mask 0x%08x", operation, me->lane(), mask);
    me->mask = mask | 1u << me->lane();
    me->orders = orders;
    me->whole_warp = whole_warp;
    me->mail_bytes = bytes;
    if (bytes) memcpy(me->mail, mail, bytes);
    wait(Fiber::AT_WARP_OPERATION, line, operation);
}
const void* mail_from(int lane) {
    if (!(me->received->lanes >> lane & 1))
        complain("absent lane", -me->line, 0, "%s: lane %d reads from lane %d, %s: what it gets is undefined", me->operation, me->lane(), lane,
                 me->mask >> lane & 1 ? "which does not take part (it has returned, or the block has no such thread)" : "which is not in the mask");
    return me->received->box[lane];
}
void take_mail(int lane, void* to, unsigned bytes) { memcpy(to, mail_from(lane), bytes); }
unsigned who_came() { return me->received->lanes; }
unsigned char* dynamic_shared() { return arena + FENCE_BYTES; }

static void life_of_a_thread() {
    Busy::depth = 0;                            // from here on it is the kernel's code that runs
    launch->body(launch->arguments);
    Busy busy;
    for (auto& group : me->copies)
        if (!group.empty()) { complain("copy", group[0].place, 0, "a thread ends while a copy that it started is under way: wait for it (copy_wait<0>)"); break; }
    wait(Fiber::DONE, 0, "");
}

// ---- in the scheduler: setting free ------------------------------------------------------------------------------------------
static bool release_barrier() {
    int waiting = 0, done = 0, votes = 0;
    Fiber *first = nullptr, *other = nullptr;
    for (Fiber& f : fibers) {
        done += f.state == Fiber::DONE;
        if (f.state != Fiber::AT_BARRIER) continue;
        ++waiting;
        votes += f.vote;
        if (!first) first = &f;
        if (f.line != first->line && !other) other = &f;
    }
    if (!waiting || waiting + done < int(fibers.size())) return false;
    me = first;                                 // whom the report names
    if (done)
        complain("divergent barrier", -first->line, 0, "only %d of the block's %d threads reach this __syncthreads, the others have returned. "
                 "GPUs before Volta hang here: let every thread come to the barrier", waiting, int(fibers.size()));
    if (other)
        complain("divergent barrier", -first->line, -other->line, "threads of one block wait at different barriers: this one is at "
                 "{here}, thread %d at {there}. All must reach the same __syncthreads", other->number);
    me = nullptr;
    ++epoch;
    for (Fiber& f : fibers)
        if (f.state == Fiber::AT_BARRIER) { f.state = Fiber::READY; f.vote = votes; }
    return true;
}

// Of the lanes that f waits for: who is still missing? Lanes that have returned are not waited for.
static Fiber* missing(const Fiber& f) {
    const size_t warp = f.warp() * 32;
    for (size_t i = warp; i < std::min(warp + 32, fibers.size()); ++i) {
        Fiber& g = fibers[i];
        if (f.mask >> g.lane() & 1 && g.state != Fiber::DONE &&
            !(g.state == Fiber::AT_WARP_OPERATION && g.line == f.line && g.mask == f.mask && !strcmp(g.operation, f.operation))) return &g;
    }
    return nullptr;
}
static void release_group(Fiber& f) {
    auto mail = std::make_shared<Mail>();
    mail->lanes = 0;
    memset(mail->box, 0xff, sizeof mail->box);
    std::vector<Fiber*> group;
    uint32_t latest[32] = {};
    for (size_t i = f.warp() * 32; i < std::min<size_t>(f.warp() * 32 + 32, fibers.size()); ++i) {
        Fiber& g = fibers[i];
        if (!(f.mask >> g.lane() & 1) || g.state == Fiber::DONE) continue;
        group.push_back(&g);
        mail->lanes |= 1u << g.lane();
        memcpy(mail->box[g.lane()], g.mail, g.mail_bytes);
        for (int k = 0; k < 32; ++k) latest[k] = std::max(latest[k], g.seen[k]);
    }
    if (f.whole_warp && mail->lanes != 0xffffffffu) {
        me = &f;
        complain("absent lane", -f.line, 0, "%s needs all 32 lanes of the warp, but only %d take part", f.operation, __builtin_popcount(mail->lanes));
        me = nullptr;
    }
    for (Fiber* g : group) {
        g->received = mail;
        g->state = Fiber::READY;
        if (!g->orders) continue;
        std::copy(latest, latest + 32, g->seen);                        // all know of all that came before, ...
        ++g->seen[g->lane()];                                           // ... and of nothing that comes after
    }
}
static bool release_warps() {
    bool any = false;
    for (Fiber& f : fibers)
        if (f.state == Fiber::AT_WARP_OPERATION && !missing(f)) { release_group(f); any = true; }
    return any;
}

static std::string whereabouts(const Fiber& f) {
    static const char* const places[] = {"is still running", "waits at __syncthreads", "waits at", "has returned"};
    std::string text = "thread " + std::to_string(f.number) + " " + places[f.state];
    if (f.state == Fiber::AT_WARP_OPERATION) text += std::string(" ") + f.operation;
    return f.line && f.state != Fiber::DONE ? text + " (line " + std::to_string(f.line) + ")" : text;
}
static void explain_deadlock() {
    for (Fiber& f : fibers) {
        Fiber* absent = f.state == Fiber::AT_WARP_OPERATION ? missing(f) : nullptr;
        if (!absent) continue;
        me = &f;
        complain("deadlock", -f.line, -absent->line, "nothing can go on: %s waits here for lanes 0x%08x of its warp, among them %s", f.operation,
                 f.mask, whereabouts(*absent).c_str());
        me = nullptr;
        return;
    }
    complain("deadlock", 0, 0, "nothing can go on");
}

// ---- one block ------------------------------------------------------------------------------------------------------------------
static void start(Fiber& f, int number) {
    f.state = Fiber::READY;
    f.number = number;
    f.index = {number % blockDim.x, number / blockDim.x % blockDim.y, number / blockDim.x / blockDim.y};
    f.line = f.vote = 0;
    f.operation = "";
    f.copies.assign(1, {});
    std::fill(f.seen, f.seen + 32, 0);
    f.seen[f.lane()] = 1;
    getcontext(&f.context);
    f.context.uc_stack.ss_sp = stacks + number * (STACK_BYTES + GUARD_BYTES) + GUARD_BYTES;
    f.context.uc_stack.ss_size = STACK_BYTES;
    f.context.uc_link = &scheduler;
    makecontext(&f.context, life_of_a_thread, 0);
}
static void resume(Fiber& f) {
    Busy::depth = 1;
    me = &f;
    threadIdx = f.index;
    swapcontext(&scheduler, &f.context);
    me = nullptr;
}
// Seed 0: in order. 1: backwards. Others: shuffled anew each round, and half of the warps rest, so that some run far ahead.
static bool one_round(std::vector<int>& order) {
    const unsigned seed = launch->seed;
    if (seed > 1) std::shuffle(order.begin(), order.end(), random_numbers);
    const uint32_t resting = seed > 1 ? random_numbers() : 0;
    bool ready = false;
    for (int i : order) {
        if (fibers[i].state != Fiber::READY) continue;
        ready = true;
        if (resting >> fibers[i].warp() & 1) continue;
        resume(fibers[i]);
        if (abandoned) return false;
    }
    return ready;
}
static void poison(unsigned char* memory, size_t bytes) {               // what nobody sets is NaN
    for (size_t i = 0; i + 1 < bytes; i += 2) memcpy(memory + i, POISON, 2);
}
static void run_block(std::vector<int>& order) {
    poison(arena, launch->shared_bytes + 2 * FENCE_BYTES);
    poison(static_shared.from, static_shared.bytes);
    block_epoch = ++epoch;
    for (size_t i = 0; i < fibers.size(); ++i) start(fibers[i], i);
    while (!abandoned) {
        bool busy = one_round(order);
        if (abandoned) break;
        busy |= release_warps();
        busy |= release_barrier();
        if (busy) continue;
        if (std::any_of(fibers.begin(), fibers.end(), [](Fiber& f) { return f.state != Fiber::DONE; })) { explain_deadlock(); abandoned = true; }
        break;
    }
    checker_end_block();
}

// ---- what a kernel may do to the process ------------------------------------------------------------------------------------------
// Signals of the kernel's own making (a null pointer, a full stack, a division by zero) end the launch, not the process. A timer
// of this thread's CPU time ends a kernel that does not. Both jump back to the scheduler; the fibers' stacks are given up.
static const int signals[] = {SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGTRAP};
constexpr int SIGNALS = sizeof signals / sizeof *signals;
static struct sigaction previous[SIGNALS], previous_clock;
static const int CLOCK = SIGRTMIN + 7;
static pid_t launching_thread;
static double used;
constexpr double TICK = 0.02;

static void on_fault(int signal, siginfo_t* info, void* context) {
    if (!me || syscall(SYS_gettid) != launching_thread) {               // not ours: as if we were not here
        for (int i = 0; i < SIGNALS; ++i) if (signals[i] == signal) sigaction(signal, &previous[i], nullptr);
        return;
    }
    const uintptr_t at = (uintptr_t)info->si_addr;
#if defined(__x86_64__)
    const uintptr_t instruction = ((ucontext_t*)context)->uc_mcontext.gregs[REG_RIP];
#elif defined(__aarch64__)
    const uintptr_t instruction = ((ucontext_t*)context)->uc_mcontext.pc;
#else
    const uintptr_t instruction = 0;
#endif
    const bool ours = instruction - (uintptr_t)module.from < module.bytes;      // not so after a call through a wild pointer
    const Place place = ours ? place_of(instruction + 1) : 0;
    const uintptr_t stack = (uintptr_t)me->context.uc_stack.ss_sp;
    if (signal == SIGFPE) complain("arithmetic", place, 0, "an integer is divided by zero");
    else if (signal == SIGILL || signal == SIGTRAP) complain("stopped", place, 0, "the kernel stopped itself");
    else if (at < stack && at >= stack - GUARD_BYTES)
        complain("stack overflow", place, 0, "the thread's local variables and calls need more than %zu KB of stack: an endless recursion, or too large arrays", STACK_BYTES >> 10);
    else if (at < 65536 && info->si_code != SI_KERNEL) complain("out of bounds", place, 0, "an access through a null pointer (address %zu)", (size_t)at);
    else complain("out of bounds", place, 0, "an access to memory that does not exist, or 16 bytes at an address that is no multiple of 16");
    abandon();
}
static void on_clock(int, siginfo_t*, void*) {
    used += TICK;
    if (used < launch->seconds || !me || Busy::depth) return;           // in the runtime's own code: the next tick will do
    complain("time limit", 0, 0, "the launch was stopped after %.3g s of computing (kernel.time_limit). An endless loop, or one that waits for another "
             "thread: here a thread runs until it reaches a barrier, so that waiting in a loop never ends", launch->seconds);
    abandon();
}
struct Guarded {                                // from here to the end of the scope signals are ours
    stack_t stack{}, previous_stack{};
    timer_t clock;
    std::vector<unsigned char> memory;
    Guarded() : memory(64 << 10) {
        launching_thread = syscall(SYS_gettid);
        used = 0;
        stack.ss_sp = memory.data();
        stack.ss_size = memory.size();
        sigaltstack(&stack, &previous_stack);
        struct sigaction ours{};
        ours.sa_flags = SA_SIGINFO | SA_ONSTACK;
        ours.sa_sigaction = on_fault;
        for (int i = 0; i < SIGNALS; ++i) sigaction(signals[i], &ours, &previous[i]);
        ours.sa_flags |= SA_RESTART;
        ours.sa_sigaction = on_clock;
        sigaction(CLOCK, &ours, &previous_clock);
        sigevent event{};
        event.sigev_notify = SIGEV_THREAD_ID;
        event.sigev_signo = CLOCK;
        event._sigev_un._tid = launching_thread;
        timer_create(CLOCK_THREAD_CPUTIME_ID, &event, &clock);
        const itimerspec every{{0, long(TICK * 1e9)}, {0, long(TICK * 1e9)}};
        timer_settime(clock, 0, &every, nullptr);
    }
    ~Guarded() {
        timer_delete(clock);
        sigaction(CLOCK, &previous_clock, nullptr);
        for (int i = 0; i < SIGNALS; ++i) sigaction(signals[i], &previous[i], nullptr);
        sigaltstack(&previous_stack, nullptr);
    }
};
struct Stacks {                                 // one per thread of a block, with a guard below that may not be touched
    size_t bytes;
    explicit Stacks(size_t threads) : bytes(threads * (STACK_BYTES + GUARD_BYTES)) {
        void* p = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        stacks = p == MAP_FAILED ? nullptr : static_cast<unsigned char*>(p);
        for (size_t i = 0; stacks && i < threads; ++i) mprotect(stacks + i * (STACK_BYTES + GUARD_BYTES), GUARD_BYTES, PROT_NONE);
    }
    ~Stacks() { if (stacks) munmap(stacks, bytes); stacks = nullptr; }
};
bool in_stack_of(const Fiber& f, uintptr_t address) {
    const uintptr_t top = (uintptr_t)f.context.uc_stack.ss_sp + STACK_BYTES;
    return address < top && address >= top - STACK_BYTES - GUARD_BYTES;
}

// ---- where the module lies in memory --------------------------------------------------------------------------------------------
static int look_at_module(dl_phdr_info* info, size_t, void*) {
    uintptr_t low = UINTPTR_MAX, high = 0;
    Memory shared_block{nullptr, 0};
    for (int i = 0; i < info->dlpi_phnum; ++i) {
        const auto& segment = info->dlpi_phdr[i];
        const uintptr_t from = info->dlpi_addr + segment.p_vaddr;
        if (segment.p_type == PT_LOAD) { low = std::min(low, from); high = std::max(high, from + segment.p_memsz); }
        if (segment.p_type == PT_TLS) shared_block = {static_cast<unsigned char*>(info->dlpi_tls_data), segment.p_memsz};
    }
    const uintptr_t here = (uintptr_t)&look_at_module;
    if (here < low || here >= high) return 0;                           // another module
    module = {(unsigned char*)info->dlpi_addr, high - info->dlpi_addr};
    static_shared = shared_block;
    return 1;
}

static std::vector<unsigned> block_order(unsigned count, unsigned seed) {
    std::vector<unsigned> order(count);
    std::iota(order.begin(), order.end(), 0u);
    if (seed == 1) std::reverse(order.begin(), order.end());
    if (seed > 1) std::shuffle(order.begin(), order.end(), random_numbers);
    return order;
}
static void run_all_blocks() {
    const unsigned threads = blockDim.x * blockDim.y * blockDim.z;
    fibers.assign(threads, Fiber());
    std::vector<int> order(threads);
    std::iota(order.begin(), order.end(), 0);
    if (launch->seed == 1) std::reverse(order.begin(), order.end());
    for (unsigned i : block_order(gridDim.x * gridDim.y * gridDim.z, launch->seed)) {
        if (abandoned || faults.size() >= ENOUGH) break;
        blockIdx = {i % gridDim.x, i / gridDim.x % gridDim.y, i / gridDim.x / gridDim.y};
        run_block(order);
    }
    fibers.clear();
}

}  // namespace cpu

extern "C" {
// The kernel's printf, assert and call of a pure virtual function: its library binds these names here before the C library's.
int printf(const char* format, ...) {
    using namespace cpu;
    Busy busy;
    char text[1024];
    va_list values;
    va_start(values, format);
    vsnprintf(text, sizeof text, format, values);
    va_end(values);
    if (printed.size() < 1 << 20) printed += text;                      // like the GPU's, the buffer for printf is limited
    int arguments = 0;                                                  // CUDA's printf returns their number
    for (const char* p = strchr(format, '%'); p && p[1]; p = strchr(p + 2, '%')) arguments += p[1] != '%';
    return arguments;
}
void __assert_fail(const char* truth, const char*, unsigned line, const char*) noexcept {
    cpu::complain("stopped", -cpu::Place(line), 0, "assert(%s) is false", truth);
    cpu::abandon();
}
void __cxa_pure_virtual() { cpu::failed(0, "a pure virtual function is called"); }

void* emulator_touch_static_shared();           // beside the kernels
// The number of different faults; -1 where there is no memory for the stacks.
int emulator_launch(cpu::Launch* what) {
    using namespace cpu;
    launch = what;
    known.clear();
    faults.clear();
    printed.clear();
    abandoned = false;
    epoch = 0;
    random_numbers.seed(what->seed);
    blockDim = {what->block[0], what->block[1], what->block[2]};
    gridDim = {what->grid[0], what->grid[1], what->grid[2]};
    std::unique_ptr<unsigned char[]> memory(new unsigned char[SHARED_BYTES + 2 * FENCE_BYTES + 1024]);
    arena = memory.get() + (1024 - (uintptr_t)memory.get() % 1024);
    Stacks stacks_of_this_launch(blockDim.x * blockDim.y * blockDim.z);
    if (!stacks) return -1;
    emulator_touch_static_shared();             // the first touch by a thread of the operating system makes its copy
    dl_iterate_phdr(look_at_module, nullptr);
    checker_begin();
    { Guarded process; run_all_blocks(); }
    checker_end();
    write_report();
    return faults.size();
}
const char* emulator_report() { return cpu::report.c_str(); }
const char* emulator_printed() { return cpu::printed.c_str(); }
}
