//! System calls in a process that has no stub, such that the tracer may die at any moment. Each call returns into
//! `rt_sigreturn`, which makes the next call, and the last frame restores the thread's previous state. All frames lie
//! below the thread's stack, and the previous bytes there are restored.

use super::halt::portable_registers;
use crate::error::{Error, Result, unexpected_text};
use crate::image::ADDRESS_END;
use crate::procfs::MapLine;
use crate::trace::{
    ProcessMemory, Registers, StopReason, StubExitSignal, Tracee, frame, wait_for_stop,
};
use std::time::Duration;

/// `syscall; ret`.
const SYSCALL_RET: &[u8] = &[0x0f, 0x05, 0xc3];
/// `mov $15, %rax; syscall`, in the two encodings with which C libraries and Go return from signal handlers.
const SIGRETURN: [&[u8]; 2] = [
    &[0x48, 0xc7, 0xc0, 15, 0, 0, 0, 0x0f, 0x05],
    &[0xb8, 15, 0, 0, 0, 0x0f, 0x05],
];
/// Most bytes of a mapping that are searched.
const SEARCHED_MAX: u64 = 32 << 20;
/// Bytes below the stack pointer that leaf functions use.
const RED_ZONE: u64 = 128;
/// Size in bytes of a frame without vector registers, including a return address below it.
const FRAME_BYTES: u64 = 512;
/// Offset at which the frame begins.
const FRAME_OFFSET: u64 = 64;

/// Makes calls in a stopped thread. Returns false if the program lacks the instructions that a chain needs. The
/// calls' results are unknown.
pub(super) fn run(
    tracee: Tracee,
    memory: &ProcessMemory,
    maps: &[MapLine],
    exit: StubExitSignal,
    calls: &[RawCall],
) -> Result<bool> {
    let StubExitSignal {
        process,
        thread,
        signal,
        ..
    } = exit;
    let read = |address, bytes: &mut [u8]| memory.read(address, bytes);
    let keeps_code = |map: &MapLine| !calls.iter().any(|call| unmaps_code(call, map));
    let kept_maps = maps.iter().filter(|map| keeps_code(map));
    let Some((call, sigreturn)) = find_instructions(read, kept_maps) else {
        return Ok(false);
    };
    let (before, mask) = (
        tracee.registers()?.with_call_number_recovered(memory),
        tracee.signal_mask()?,
    );
    let last = (
        libc::SYS_tgkill,
        [process as u64, thread as u64, signal as u64, 0, 0, 0],
    );
    let chain = SigreturnChain {
        call,
        sigreturn,
        before,
        mask,
        extended: tracee.extended_registers()?,
        chain_mask: !(1 << (signal - 1)),
    };
    let (base, bytes) = chain.build_frames(calls, last);
    let mut saved = vec![0; bytes.len()];
    if memory.read(base, &mut saved).is_err() || memory.write(base, &bytes).is_err() {
        return Ok(false);
    }
    tracee.set_signal_mask(chain.chain_mask)?;
    tracee.set_registers(&chain.registers_for_call(base, 0, calls[0]))?;
    let outcome = wait_for_end(tracee, signal, call + 2);
    let is_heard = exit.is_handled || mask & 1 << (signal - 1) != 0;
    if is_heard && matches!(outcome, Ok(true)) {
        tracee.send_signal(signal);
    }
    if !matches!(outcome, Err(Error::ProcessEnded(_))) {
        // The frames have erased the kernel's record of the interrupted call and the vector registers: only the last
        // frame has them.
        tracee.set_registers(&portable_registers(before))?;
        tracee.set_extended_registers(&chain.extended)?;
        tracee.set_signal_mask(mask)?;
        memory.write(base, &saved)?;
    }
    outcome.map(|_| true)
}

/// Returns true if the call unmaps the code of this mapping.
fn unmaps_code(&(number, [start, bytes, ..]): &RawCall, map: &MapLine) -> bool {
    number == libc::SYS_munmap && map.start < start.saturating_add(bytes) && start < map.end
}

/// Number and arguments of a call.
type RawCall = (libc::c_long, [u64; 6]);

/// Data from which the frames are made.
struct SigreturnChain {
    /// Addresses of `syscall; ret`, and of the code that calls `rt_sigreturn`.
    call: u64,
    sigreturn: u64,
    /// The thread's previous state.
    before: Registers,
    mask: u64,
    extended: Vec<u8>,
    /// Signals blocked during the chain: all but the signal of the last call.
    chain_mask: u64,
}

impl SigreturnChain {
    /// Returns the address and the bytes of the frames.
    fn build_frames(&self, calls: &[RawCall], last: RawCall) -> (u64, Vec<u8>) {
        let frames_bytes = FRAME_BYTES * (calls.len() as u64 + 2) + self.extended.len() as u64;
        let base = self.before.rsp.wrapping_sub(RED_ZONE + frames_bytes) & !63;
        let frame_address = |number: u64| base + FRAME_BYTES * number + FRAME_OFFSET;
        let mut bytes = vec![0; frames_bytes as usize];
        let mut put = |number: u64, content: &[u8]| {
            let offset = (FRAME_BYTES * number + FRAME_OFFSET) as usize;
            bytes[offset - 8..offset].copy_from_slice(&self.sigreturn.to_ne_bytes());
            bytes[offset..offset + content.len()].copy_from_slice(content);
        };
        for (number, next) in (0u64..).zip(calls[1..].iter().copied().chain([last])) {
            let registers = self.registers_for_call(base, number + 1, next);
            put(
                number,
                &frame(frame_address(number), &registers, &[], self.chain_mask),
            );
        }
        let (end, before) = (calls.len() as u64, self.before.with_call_restarted());
        put(
            end,
            &frame(frame_address(end), &before, &self.extended, self.mask),
        );
        (base, bytes)
    }

    /// Returns the registers of the thread about to make call `number` of the chain.
    fn registers_for_call(&self, base: u64, number: u64, call: RawCall) -> Registers {
        let stack = base + FRAME_BYTES * number + FRAME_OFFSET - 8;
        call_registers(&self.before, self.call, stack, call)
    }
}

/// Returns the registers of a thread about to make a call.
fn call_registers(
    before: &Registers,
    call: u64,
    stack: u64,
    (number, arguments): RawCall,
) -> Registers {
    let [rdi, rsi, rdx, r10, r8, r9] = arguments;
    Registers {
        rip: call,
        rax: number as u64,
        orig_rax: u64::MAX,
        rdi,
        rsi,
        rdx,
        r10,
        r8,
        r9,
        rsp: stack,
        ..*before
    }
}

/// Waits for the end of the chain. Returns true if another signal of the same number came meanwhile.
fn wait_for_end(tracee: Tracee, signal: i32, end: u64) -> Result<bool> {
    let (mut stopped, mut signalled) = (false, false);
    loop {
        tracee.resume(0)?;
        match wait_for_stop(tracee.tid, Duration::from_secs(10))? {
            StopReason::Ended(_) => return Err(Error::ProcessEnded(tracee.tid)),
            StopReason::Signal(libc::SIGSTOP) => stopped = true,
            StopReason::Signal(got) if got == signal && tracee.registers()?.rip == end => break,
            StopReason::Signal(got) if got != signal => {
                return Err(unexpected_text(&format!(
                    "unexpected signal {got} during a chain of system calls"
                )));
            }
            StopReason::Signal(_) => signalled = true,
            _ => {}
        }
    }
    if stopped {
        tracee.send_signal(libc::SIGSTOP);
    }
    Ok(signalled)
}

/// Returns the addresses of both code sequences that a chain needs. Small mappings are searched first: the C library
/// and the vDSO have the sequences and are smaller than many programs, and the program is stopped during the search.
fn find_instructions<'a>(
    read: impl Fn(u64, &mut [u8]) -> Result<()>,
    maps: impl Iterator<Item = &'a MapLine>,
) -> Option<(u64, u64)> {
    let executable =
        |map: &&MapLine| map.protection & libc::PROT_EXEC != 0 && map.end <= ADDRESS_END;
    let mut code: Vec<&MapLine> = maps.filter(executable).collect();
    code.sort_by_key(|map| map.end - map.start);
    let (mut call, mut back) = (None, None);
    for map in code {
        let mut bytes = vec![0; (map.end - map.start).min(SEARCHED_MAX) as usize];
        if read(map.start, &mut bytes).is_err() {
            continue;
        }
        let find = |what: &[u8]| {
            let at = bytes.windows(what.len()).position(|found| found == what)?;
            Some(map.start + at as u64)
        };
        call = call.or_else(|| find(SYSCALL_RET));
        back = back.or_else(|| SIGRETURN.iter().find_map(|code| find(code)));
        if let (Some(call), Some(back)) = (call, back) {
            return Some((call, back));
        }
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::procfs::parse_maps;
    use std::cell::Cell;

    fn code(start: u64, bytes: u64) -> MapLine {
        let text = format!("{start:x}-{:x} r-xp 00000000 00:00 0 \n", start + bytes);
        parse_maps(text.as_bytes()).expect("parses").remove(0)
    }

    /// A program of 100 MiB is not searched if its C library has both sequences.
    #[test]
    fn small_mappings_are_searched_first() {
        let maps = [code(0x40_0000, 100 << 20), code(0x7f00_0000_0000, 4096)];
        let searched = Cell::new(0);
        let read = |address: u64, bytes: &mut [u8]| {
            searched.set(searched.get() + bytes.len());
            if address == maps[1].start {
                bytes[100..103].copy_from_slice(SYSCALL_RET);
                bytes[200..209].copy_from_slice(SIGRETURN[0]);
            }
            Ok(())
        };
        let found = find_instructions(read, maps.iter());
        assert_eq!(found, Some((maps[1].start + 100, maps[1].start + 200)));
        assert_eq!(searched.get(), 4096);
    }

    /// Code that unmaps a stub must not lie in that stub.
    #[test]
    fn unmapped_code_is_detected() {
        let unmap: RawCall = (libc::SYS_munmap, [0x20_0000, 8192, 0, 0, 0, 0]);
        assert!(unmaps_code(&unmap, &code(0x20_0000, 4096)));
        assert!(unmaps_code(&unmap, &code(0x10_0000, 0x10_1000)));
        assert!(!unmaps_code(&unmap, &code(0x20_2000, 4096)));
        assert!(!unmaps_code(&unmap, &code(0x1f_f000, 4096)));
        let map: RawCall = (libc::SYS_mmap, unmap.1);
        assert!(!unmaps_code(&map, &code(0x20_0000, 4096)));
    }

    /// The two sequences may lie in different mappings.
    #[test]
    fn sequences_may_lie_in_different_mappings() {
        let maps = [
            code(0x10_0000, 4096),
            code(0x20_0000, 8192),
            code(0x30_0000, 12288),
        ];
        let read = |address: u64, bytes: &mut [u8]| {
            match address {
                0x10_0000 => bytes[0..3].copy_from_slice(SYSCALL_RET),
                0x20_0000 => return Err(unexpected_text("nobody may read it")),
                _ => bytes[12281..].copy_from_slice(SIGRETURN[1]),
            }
            Ok(())
        };
        let found = find_instructions(read, maps.iter());
        assert_eq!(found, Some((0x10_0000, 0x30_0000 + 12281)));
    }
}
