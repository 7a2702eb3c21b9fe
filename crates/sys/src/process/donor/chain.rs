//! System calls in a process that has no stub, such that the tracer may die at any moment. Each call returns into
//! `rt_sigreturn`, which makes the next call, and the last frame restores the thread's previous state. All frames lie
//! below the thread's stack, and the previous bytes there are restored.

use super::halt::portable;
use crate::process::error::{Error, Result, unexpected};
use crate::process::image::ADDRESS_END;
use crate::process::procfs::MapLine;
use crate::process::trace::{Exit, Memory, Registers, Stop, Tracee, frame, wait_for};
use std::time::Duration;

/// `syscall; ret`.
const CALL: &[u8] = &[0x0f, 0x05, 0xc3];
/// `mov $15, %rax; syscall`, in the two encodings with which C libraries and Go return from signal handlers.
const RETURN: [&[u8]; 2] = [
    &[0x48, 0xc7, 0xc0, 15, 0, 0, 0, 0x0f, 0x05],
    &[0xb8, 15, 0, 0, 0, 0x0f, 0x05],
];
/// Most bytes of a mapping that are searched.
const SEARCHED_MAX: u64 = 32 << 20;
/// Bytes below the stack pointer that leaf functions use.
const RED_ZONE: u64 = 128;
/// Size in bytes of a frame without vector registers, including a return address below it.
const FRAME: u64 = 512;
/// Offset at which the frame begins.
const BEGIN: u64 = 64;

/// Makes calls in a stopped thread. Returns false if the program lacks the instructions that a chain needs. The
/// calls' results are unknown.
pub(super) fn run(
    tracee: Tracee,
    memory: &Memory,
    maps: &[MapLine],
    exit: Exit,
    calls: &[Call],
) -> Result<bool> {
    let Exit {
        process,
        thread,
        signal,
        ..
    } = exit;
    let read = |address, bytes: &mut [u8]| memory.read(address, bytes);
    let stays = |map: &MapLine| !calls.iter().any(|call| takes_away(call, map));
    let staying = maps.iter().filter(|map| stays(map));
    let Some((call, back)) = instructions(read, staying) else {
        return Ok(false);
    };
    let (before, mask) = (tracee.registers()?.recall(memory), tracee.mask()?);
    let last = (
        libc::SYS_tgkill,
        [process as u64, thread as u64, signal as u64, 0, 0, 0],
    );
    let chain = Chain {
        call,
        back,
        before,
        mask,
        extended: tracee.extended()?,
        only: !(1 << (signal - 1)),
    };
    let (base, bytes) = chain.lay(calls, last);
    let mut saved = vec![0; bytes.len()];
    if memory.read(base, &mut saved).is_err() || memory.write(base, &bytes).is_err() {
        return Ok(false);
    }
    tracee.set_mask(chain.only)?;
    tracee.set_registers(&chain.making(base, 0, calls[0]))?;
    let outcome = wait_for_end(tracee, signal, call + 2);
    let heard = exit.is_heard || mask & 1 << (signal - 1) != 0;
    if heard && matches!(outcome, Ok(true)) {
        tracee.send(signal);
    }
    if !matches!(outcome, Err(Error::Gone(_))) {
        // The frames have erased the kernel's record of the interrupted call and the vector registers: only the last
        // frame has them.
        tracee.set_registers(&portable(before))?;
        tracee.set_extended(&chain.extended)?;
        tracee.set_mask(mask)?;
        memory.write(base, &saved)?;
    }
    outcome.map(|_| true)
}

/// Returns true if the call unmaps the code of this mapping.
fn takes_away(&(number, [start, bytes, ..]): &Call, map: &MapLine) -> bool {
    number == libc::SYS_munmap && map.start < start.saturating_add(bytes) && start < map.end
}

/// Number and arguments of a call.
type Call = (libc::c_long, [u64; 6]);

/// Data from which the frames are made.
struct Chain {
    /// Addresses of `syscall; ret`, and of the code that calls `rt_sigreturn`.
    call: u64,
    back: u64,
    /// The thread's previous state.
    before: Registers,
    mask: u64,
    extended: Vec<u8>,
    /// Signals blocked during the chain: all but the signal of the last call.
    only: u64,
}

impl Chain {
    /// Returns the address and the bytes of the frames.
    fn lay(&self, calls: &[Call], last: Call) -> (u64, Vec<u8>) {
        let room = FRAME * (calls.len() as u64 + 2) + self.extended.len() as u64;
        let base = self.before.rsp.wrapping_sub(RED_ZONE + room) & !63;
        let place = |number: u64| base + FRAME * number + BEGIN;
        let mut bytes = vec![0; room as usize];
        let mut put = |number: u64, content: &[u8]| {
            let at = (FRAME * number + BEGIN) as usize;
            bytes[at - 8..at].copy_from_slice(&self.back.to_ne_bytes());
            bytes[at..at + content.len()].copy_from_slice(content);
        };
        for (number, next) in (0u64..).zip(calls[1..].iter().copied().chain([last])) {
            let making = self.making(base, number + 1, next);
            put(number, &frame(place(number), &making, &[], self.only));
        }
        let (end, before) = (calls.len() as u64, self.before.restarted());
        put(end, &frame(place(end), &before, &self.extended, self.mask));
        (base, bytes)
    }

    /// Returns the registers of the thread about to make call `number` of the chain.
    fn making(&self, base: u64, number: u64, what: Call) -> Registers {
        let stack = base + FRAME * number + BEGIN - 8;
        at_call(&self.before, self.call, stack, what)
    }
}

/// Returns the registers of a thread about to make a call.
fn at_call(before: &Registers, call: u64, stack: u64, (number, arguments): Call) -> Registers {
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
        match wait_for(tracee.tid, Duration::from_secs(10))? {
            Stop::Ended(_) => return Err(Error::Gone(tracee.tid)),
            Stop::Signal(libc::SIGSTOP) => stopped = true,
            Stop::Signal(got) if got == signal && tracee.registers()?.rip == end => break,
            Stop::Signal(got) if got != signal => {
                return Err(unexpected(&format!("a chain of calls got signal {got}")));
            }
            Stop::Signal(_) => signalled = true,
            _ => {}
        }
    }
    if stopped {
        tracee.send(libc::SIGSTOP);
    }
    Ok(signalled)
}

/// Returns the addresses of both code sequences that a chain needs. Small mappings are searched first: the C library
/// and the vDSO have the sequences and are smaller than many programs, and the program is stopped during the search.
fn instructions<'a>(
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
        call = call.or_else(|| find(CALL));
        back = back.or_else(|| RETURN.iter().find_map(|code| find(code)));
        if let (Some(call), Some(back)) = (call, back) {
            return Some((call, back));
        }
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::process::procfs::parse_maps;
    use std::cell::Cell;

    fn code(start: u64, bytes: u64) -> MapLine {
        let text = format!("{start:x}-{:x} r-xp 00000000 00:00 0 \n", start + bytes);
        parse_maps(text.as_bytes()).expect("parses").remove(0)
    }

    /// A program of 100 MiB is not searched if its C library has both sequences.
    #[test]
    fn what_is_small_is_searched_first() {
        let maps = [code(0x40_0000, 100 << 20), code(0x7f00_0000_0000, 4096)];
        let searched = Cell::new(0);
        let read = |address: u64, bytes: &mut [u8]| {
            searched.set(searched.get() + bytes.len());
            if address == maps[1].start {
                bytes[100..103].copy_from_slice(CALL);
                bytes[200..209].copy_from_slice(RETURN[0]);
            }
            Ok(())
        };
        let found = instructions(read, maps.iter());
        assert_eq!(found, Some((maps[1].start + 100, maps[1].start + 200)));
        assert_eq!(searched.get(), 4096);
    }

    /// Code that unmaps a stub must not lie in that stub.
    #[test]
    fn code_that_a_call_takes_away_is_told() {
        let unmap: Call = (libc::SYS_munmap, [0x20_0000, 8192, 0, 0, 0, 0]);
        assert!(takes_away(&unmap, &code(0x20_0000, 4096)));
        assert!(takes_away(&unmap, &code(0x10_0000, 0x10_1000)));
        assert!(!takes_away(&unmap, &code(0x20_2000, 4096)));
        assert!(!takes_away(&unmap, &code(0x1f_f000, 4096)));
        let map: Call = (libc::SYS_mmap, unmap.1);
        assert!(!takes_away(&map, &code(0x20_0000, 4096)));
    }

    /// The two sequences may lie in different mappings.
    #[test]
    fn both_may_be_far_from_each_other() {
        let maps = [
            code(0x10_0000, 4096),
            code(0x20_0000, 8192),
            code(0x30_0000, 12288),
        ];
        let read = |address: u64, bytes: &mut [u8]| {
            match address {
                0x10_0000 => bytes[0..3].copy_from_slice(CALL),
                0x20_0000 => return Err(unexpected("nobody may read it")),
                _ => bytes[12281..].copy_from_slice(RETURN[1]),
            }
            Ok(())
        };
        let found = instructions(read, maps.iter());
        assert_eq!(found, Some((0x10_0000, 0x30_0000 + 12281)));
    }
}
