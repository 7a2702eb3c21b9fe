//! System calls that a stop has cut short.
//!
//! To the kernel, a stop looks like a pending signal. If there is no signal after all, the kernel restarts most calls
//! by itself. Calls that return `EINTR` instead are made again. A call that has done a part of its work returns the
//! size of that part. Its thread makes the rest in [`rest_code`](crate::trace::rest_code), which gives the
//! program the result of the whole call. Both are arranged while the thread is stopped, so that neither a thaw, nor a
//! move, nor the death of the tracer shows the program a difference.

use super::free_range;
use super::halt::{HaltedThread, has_deliverable_signal};
use super::tracker_attachment::{make_stubless_calls, read_stub_exit_signal};
use crate::error::{Context, Result, unexpected_text};
use crate::procfs::{self, MapLine};
use crate::trace::{
    CODE_BYTES, ContinuationData, DATA_BYTES, ProcessMemory, Registers, STRUCTURES_OFFSET, Tracee,
    pidfd_getfd, pidfd_open, rest_code,
};
use holdfast_sys::sockopt::get_int;
use rustix::fs::{FileType, OFlags, fcntl_getfl, fstat, major, minor};
use std::os::fd::AsFd;

/// Most elements of a vector (`UIO_MAXIOV`).
const VECTOR_MAX: u64 = 1024;
/// Sizes in bytes of `struct iovec`, `struct msghdr` and `struct mmsghdr`.
const IOVEC_BYTES: usize = 16;
const MSGHDR_BYTES: usize = 56;
const MMSGHDR_BYTES: u64 = 64;
/// Offset of the vector in `struct msghdr`: its address, then its number of elements.
const MSGHDR_VECTOR: usize = 16;
/// Offset of control data in `struct msghdr`: their address, then their length.
const MSGHDR_CONTROL: usize = 32;
/// Offset of vector elements in the structures, behind a header.
const VECTOR_OFFSET: u64 = 64;
/// `SPLICE_F_NONBLOCK`: the rest waits for space in its output, and for nothing at its input.
const SPLICE_NONBLOCK: u64 = 2;
/// Device numbers of `/dev/zero`, `/dev/random` and `/dev/urandom`. A signal ends their reads early.
const ENDLESS_DEVICES: [(u32, u32); 3] = [(1, 5), (1, 8), (1, 9)];

/// Makes each call that the stop has interrupted go on as if there had been no stop. All threads of the process must
/// be stopped, and `threads[0]` must be the first.
pub(super) fn continue_calls(
    pid: i32,
    memory: &ProcessMemory,
    threads: &mut [HaltedThread],
) -> Result<()> {
    let mut short_calls = Vec::new();
    for thread in threads.iter_mut() {
        let tracee = thread.tracee;
        let registers = tracee.registers()?;
        let restarts = registers.is_interrupted_by_stop();
        if !restarts && !may_be_interrupted(&registers) {
            continue;
        }
        let mask = tracee.signal_mask()?;
        if has_deliverable_signal(tracee, mask)? {
            continue;
        }
        let remaining = match restarts {
            true => Some(RemainingWork::WholeCall),
            false => InterruptedThread {
                pid,
                memory,
                registers,
            }
            .remaining_work()?,
        };
        match remaining {
            None => {}
            Some(RemainingWork::WholeCall) => {
                // The call had set a temporary mask, which it sets again. Give the thread its own mask back.
                tracee.set_signal_mask(mask)?;
                tracee.set_registers(&registers.with_call_repeated())?;
                thread.if_signalled = Some(registers);
            }
            Some(RemainingWork::Part(rest)) => short_calls.push((thread, registers, rest)),
        }
    }
    if short_calls.is_empty() {
        return Ok(());
    }
    let callers: Vec<Registers> = short_calls
        .iter()
        .map(|(_, registers, _)| *registers)
        .collect();
    let code_addresses = continuation_addresses(pid, memory, &callers)?;
    for ((thread, registers, rest), base) in short_calls.into_iter().zip(code_addresses) {
        let resumed = rest.write(memory, &registers, base)?;
        thread.tracee.set_registers(&resumed)?;
        thread.if_signalled = Some(resumed.after_continuation());
    }
    Ok(())
}

/// Calls that a signal may end early, with the index of the argument that gives the requested amount, if there is
/// one.
const INTERRUPTIBLE_CALLS: [(i64, Option<usize>); 15] = [
    (libc::SYS_read, Some(2)),
    (libc::SYS_readv, None),
    (libc::SYS_preadv2, None),
    (libc::SYS_recvfrom, Some(2)),
    (libc::SYS_recvmsg, None),
    (libc::SYS_recvmmsg, Some(2)),
    (libc::SYS_write, Some(2)),
    (libc::SYS_writev, None),
    (libc::SYS_pwritev2, None),
    (libc::SYS_sendto, Some(2)),
    (libc::SYS_sendmsg, None),
    (libc::SYS_sendmmsg, Some(2)),
    (libc::SYS_sendfile, Some(3)),
    (libc::SYS_splice, Some(4)),
    (libc::SYS_getrandom, Some(1)),
];

fn may_be_interrupted(registers: &Registers) -> bool {
    let (call, done) = (registers.orig_rax as i64, registers.rax as i64);
    let known = INTERRUPTIBLE_CALLS.iter().find(|(known, _)| *known == call);
    let wanted = |at: &Option<usize>| at.map_or(u64::MAX, |at| registers.arguments()[at]);
    done > 0 && known.is_some_and(|(_, at)| (done as u64) < wanted(at))
}

/// Remaining work of a call that has returned early.
#[derive(Debug, PartialEq, Eq)]
enum RemainingWork {
    /// All of the work: the completed part has no effect.
    WholeCall,
    Part(PartialCall),
}

/// The call that does the remaining work.
#[derive(Debug, PartialEq, Eq)]
struct PartialCall {
    arguments: [u64; 6],
    vector: RemainingVector,
}

/// The remaining elements of a call's vector.
#[derive(Debug, PartialEq, Eq)]
enum RemainingVector {
    /// The call has no vector.
    None,
    /// The second argument is the vector's address, the third its number of elements.
    Argument(Vec<IoVec>),
    /// The second argument is a copy of the program's header.
    Header([u8; MSGHDR_BYTES], Vec<IoVec>),
    /// The program's own header at this address, as the kernel writes into it.
    ProgramHeader(u64, Vec<IoVec>),
}

/// Address and length in bytes of a vector element.
type IoVec = (u64, u64);

impl PartialCall {
    /// Writes the data for the code at `base`. Returns the registers with which the thread does the remaining work.
    fn write(self, memory: &ProcessMemory, before: &Registers, base: u64) -> Result<Registers> {
        let data_at = base + CODE_BYTES;
        let structures = data_at + STRUCTURES_OFFSET;
        let (parts_at, mut arguments) = (structures + VECTOR_OFFSET, self.arguments);
        let earlier_data = (before.continuation_start() == base).then(|| read_data(memory, base));
        let earlier = earlier_data.flatten();
        let mut data = earlier.unwrap_or(ContinuationData {
            is_busy: true,
            result_so_far: 0,
            arguments: before.arguments(),
            return_address: before.rip,
            changed_words: (0, [0, 0]),
            call_number: before.orig_rax,
        });
        data.result_so_far = data.result_so_far.saturating_add(before.rax);
        let mut bytes = vec![0; STRUCTURES_OFFSET as usize + VECTOR_OFFSET as usize];
        let parts = match self.vector {
            RemainingVector::None => Vec::new(),
            RemainingVector::Argument(parts) => {
                (arguments[1], arguments[2]) = (parts_at, parts.len() as u64);
                parts
            }
            RemainingVector::Header(header, parts) => {
                arguments[1] = structures;
                let header_at = STRUCTURES_OFFSET as usize;
                bytes[header_at..header_at + MSGHDR_BYTES].copy_from_slice(&header);
                let vector_words = word_bytes(&[parts_at, parts.len() as u64]);
                bytes[header_at + MSGHDR_VECTOR..][..vector_words.len()]
                    .copy_from_slice(&vector_words);
                parts
            }
            RemainingVector::ProgramHeader(header, parts) => {
                let vector_at = header.wrapping_add(MSGHDR_VECTOR as u64);
                if earlier.is_none() {
                    let mut vector_words = [0; 16];
                    memory.read(vector_at, &mut vector_words)?;
                    data.changed_words = (
                        vector_at,
                        [read_word(&vector_words, 0), read_word(&vector_words, 8)],
                    );
                }
                memory.write(vector_at, &word_bytes(&[parts_at, parts.len() as u64]))?;
                parts
            }
        };
        let fixed_part = data.encode();
        bytes[..fixed_part.len()].copy_from_slice(&fixed_part);
        bytes.extend(
            parts
                .iter()
                .flat_map(|(start, length)| word_bytes(&[*start, *length])),
        );
        memory.write(data_at, &bytes)?;
        Ok(before.at_continuation(base, before.orig_rax, arguments))
    }
}

/// A thread with a call that has returned less than was requested.
struct InterruptedThread<'a> {
    pid: i32,
    memory: &'a ProcessMemory,
    registers: Registers,
}

/// Type of a descriptor, as far as calls on it may be cut short.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum DescriptorKind {
    Pipe,
    /// A stream socket, with its `SO_RCVLOWAT`.
    Stream(u64),
    Datagram,
    /// A terminal or another device.
    CharacterDevice,
    /// A device that never has less data than requested.
    Endless,
    Other,
}

impl InterruptedThread<'_> {
    /// Returns the remaining work; `None` if the call has returned the same result as without the stop.
    fn remaining_work(&self) -> Result<Option<RemainingWork>> {
        let [a, b, c, d, e, f] = self.registers.arguments();
        let done = self.registers.rax;
        let vector = match self.registers.orig_rax as i64 {
            libc::SYS_read
            | libc::SYS_readv
            | libc::SYS_preadv2
            | libc::SYS_recvfrom
            | libc::SYS_recvmsg => return self.remaining_read(),
            libc::SYS_write if self.writes_all(a)? => RemainingVector::None,
            libc::SYS_sendto if is_blocking(d) && self.is_stream(a)? => {
                return partial_call(
                    [
                        a,
                        b.wrapping_add(done),
                        c - done,
                        continuation_flags(d),
                        e,
                        f,
                    ],
                    RemainingVector::None,
                );
            }
            libc::SYS_writev if self.writes_all(a)? => {
                RemainingVector::Argument(skip_bytes(self.read_vector(b, c)?, done))
            }
            libc::SYS_pwritev2 if d == u64::MAX && f == 0 && self.writes_all(a)? => {
                RemainingVector::Argument(skip_bytes(self.read_vector(b, c)?, done))
            }
            libc::SYS_sendmsg if is_blocking(c) && self.is_stream(a)? => {
                let (mut header, parts) = self.message_header(b)?;
                // Control data were sent with the first byte.
                header[MSGHDR_CONTROL..MSGHDR_CONTROL + 16].fill(0);
                let vector = RemainingVector::Header(header, skip_bytes(parts, done));
                return partial_call([a, b, continuation_flags(c), d, e, f], vector);
            }
            libc::SYS_sendmmsg
                if is_blocking(d)
                    && self.descriptor_kind(a)? == (DescriptorKind::Datagram, true) =>
            {
                return partial_call(
                    [a, first_unfinished_message(b, done), c - done, d, e, f],
                    RemainingVector::None,
                );
            }
            libc::SYS_recvmmsg
                if self.waits_for_all_messages(d, e)? && self.descriptor_kind(a)?.1 =>
            {
                return partial_call(
                    [a, first_unfinished_message(b, done), c - done, d, e, f],
                    RemainingVector::None,
                );
            }
            libc::SYS_sendfile if self.transfers_all(a)? => {
                return partial_call([a, b, c, d - done, e, f], RemainingVector::None);
            }
            libc::SYS_splice
                if self.descriptor_kind(a)?.0 == DescriptorKind::Pipe
                    && self.transfers_all(c)? =>
            {
                return partial_call(
                    [a, b, c, d, e - done, f | SPLICE_NONBLOCK],
                    RemainingVector::None,
                );
            }
            libc::SYS_getrandom => {
                return partial_call(
                    [a.wrapping_add(done), b - done, c, d, e, f],
                    RemainingVector::None,
                );
            }
            _ => return Ok(None),
        };
        partial_call(
            [a, b.wrapping_add(done), c.wrapping_sub(done), d, e, f],
            vector,
        )
    }

    /// [`InterruptedThread::remaining`] of a read. Most reads return the data that are available.
    fn remaining_read(&self) -> Result<Option<RemainingWork>> {
        let [a, b, c, d, e, f] = self.registers.arguments();
        let (call, done) = (self.registers.orig_rax as i64, self.registers.rax);
        let (kind, true) = self.descriptor_kind(a)? else {
            return Ok(None);
        };
        let (flags, header) = match call {
            libc::SYS_recvfrom => (d, None),
            libc::SYS_recvmsg => (c, Some(self.message_header(b)?)),
            // Reads at a position or with flags.
            libc::SYS_preadv2 if d != u64::MAX || f != 0 => return Ok(None),
            _ => (0, None),
        };
        let flag = |flag: i32| flags & flag as u64 != 0;
        let parts = match (call, &header) {
            (libc::SYS_read | libc::SYS_recvfrom, _) => vec![(b, c)],
            // The kernel has replaced the size of the control buffer by the length of the control data, so the size
            // is lost.
            (_, Some((header, _))) if read_word(header, MSGHDR_CONTROL) != 0 => return Ok(None),
            (_, Some((_, parts))) => parts.clone(),
            _ => self.read_vector(b, c)?,
        };
        let all = parts
            .iter()
            .fold(0u64, |sum, (_, length)| sum.saturating_add(*length));
        let wanted = match kind {
            DescriptorKind::Endless => all,
            DescriptorKind::Stream(_)
                if !is_blocking(flags) || flag(libc::MSG_OOB | libc::MSG_ERRQUEUE) =>
            {
                0
            }
            DescriptorKind::Stream(_) if flag(libc::MSG_WAITALL) => all,
            DescriptorKind::Stream(low_water) => all.min(low_water),
            _ => 0,
        };
        if done >= wanted {
            return Ok(None);
        }
        if flag(libc::MSG_PEEK) {
            return Ok(Some(RemainingWork::WholeCall));
        }
        let parts = first_bytes(skip_bytes(parts, done), wanted - done);
        match (call, header) {
            (libc::SYS_read | libc::SYS_recvfrom, _) => {
                let arguments = [a, b.wrapping_add(done), wanted - done, d, e, f];
                partial_call(arguments, RemainingVector::None)
            }
            (_, Some(_)) => {
                partial_call([a, b, c, d, e, f], RemainingVector::ProgramHeader(b, parts))
            }
            _ => partial_call([a, b, c, d, e, f], RemainingVector::Argument(parts)),
        }
    }

    /// Returns the type of a descriptor, and true if calls on it block.
    fn descriptor_kind(&self, number: u64) -> Result<(DescriptorKind, bool)> {
        let process = pidfd_open(self.pid)?;
        let Ok(copy) = pidfd_getfd(process.as_fd(), number as i32) else {
            return Ok((DescriptorKind::Other, false));
        };
        let doing = || format!("descriptor {number} of process {}", self.pid);
        let stat = fstat(&copy).map_err(Into::into).context(doing)?;
        let option = |name| get_int(copy.as_fd(), libc::SOL_SOCKET, name).context(doing);
        let kind = match FileType::from_raw_mode(stat.st_mode) {
            FileType::Fifo => DescriptorKind::Pipe,
            FileType::CharacterDevice => {
                let device = (major(stat.st_rdev), minor(stat.st_rdev));
                if ENDLESS_DEVICES.contains(&device) {
                    DescriptorKind::Endless
                } else {
                    DescriptorKind::CharacterDevice
                }
            }
            FileType::Socket => match option(libc::SO_TYPE)? {
                libc::SOCK_STREAM => {
                    DescriptorKind::Stream(option(libc::SO_RCVLOWAT)?.max(1) as u64)
                }
                _ => DescriptorKind::Datagram,
            },
            _ => DescriptorKind::Other,
        };
        let flags = fcntl_getfl(&copy).map_err(Into::into).context(doing)?;
        Ok((kind, !flags.contains(OFlags::NONBLOCK)))
    }

    /// Returns true if a write to the descriptor returns less than requested only when interrupted or on an error.
    fn writes_all(&self, number: u64) -> Result<bool> {
        let (kind, waits) = self.descriptor_kind(number)?;
        let is_blocking_kind = matches!(
            kind,
            DescriptorKind::Pipe | DescriptorKind::Stream(_) | DescriptorKind::CharacterDevice
        );
        Ok(is_blocking_kind && waits)
    }

    /// Like [`InterruptedThread::writes_all`], for calls that move data between files. A call that writes to a pipe returns when
    /// the pipe is full.
    fn transfers_all(&self, number: u64) -> Result<bool> {
        let (kind, waits) = self.descriptor_kind(number)?;
        Ok(matches!(
            kind,
            DescriptorKind::Stream(_) | DescriptorKind::CharacterDevice
        ) && waits)
    }

    fn is_stream(&self, number: u64) -> Result<bool> {
        let (kind, waits) = self.descriptor_kind(number)?;
        Ok(matches!(kind, DescriptorKind::Stream(_)) && waits)
    }

    /// Returns true if `recvmmsg` returns only after all messages, and its timeout has not passed.
    fn waits_for_all_messages(&self, flags: u64, timeout: u64) -> Result<bool> {
        if !is_blocking(flags) || flags & libc::MSG_WAITFORONE as u64 != 0 {
            return Ok(false);
        }
        let mut time_left = [1; 16];
        if timeout != 0 {
            self.memory.read(timeout, &mut time_left)?;
        }
        Ok(time_left != [0; 16])
    }

    /// Reads a `struct msghdr` of the program and its vector.
    fn message_header(&self, at: u64) -> Result<([u8; MSGHDR_BYTES], Vec<IoVec>)> {
        let mut header = [0; MSGHDR_BYTES];
        self.memory.read(at, &mut header)?;
        let (start, count) = (
            read_word(&header, MSGHDR_VECTOR),
            read_word(&header, MSGHDR_VECTOR + 8),
        );
        Ok((header, self.read_vector(start, count)?))
    }

    fn read_vector(&self, at: u64, count: u64) -> Result<Vec<IoVec>> {
        let mut bytes = vec![0; IOVEC_BYTES * count.min(VECTOR_MAX) as usize];
        self.memory.read(at, &mut bytes)?;
        let part = |bytes: &[u8]| (read_word(bytes, 0), read_word(bytes, 8));
        Ok(bytes.chunks_exact(IOVEC_BYTES).map(part).collect())
    }
}

#[allow(clippy::unnecessary_wraps, reason = "all calls end so")]
fn partial_call(arguments: [u64; 6], vector: RemainingVector) -> Result<Option<RemainingWork>> {
    Ok(Some(RemainingWork::Part(PartialCall { arguments, vector })))
}

/// Returns true if a socket call with these flags blocks.
fn is_blocking(flags: u64) -> bool {
    flags & libc::MSG_DONTWAIT as u64 == 0
}

/// Returns the flags for sending the rest of a message. The next call reports that the peer has closed the
/// connection.
fn continuation_flags(flags: u64) -> u64 {
    (flags | libc::MSG_NOSIGNAL as u64) & !(libc::MSG_FASTOPEN as u64)
}

/// Returns the address of the first message that is not done.
fn first_unfinished_message(at: u64, done: u64) -> u64 {
    at.wrapping_add(done.wrapping_mul(MMSGHDR_BYTES))
}

/// Returns a vector without its first `bytes` bytes.
fn skip_bytes(parts: Vec<IoVec>, mut bytes: u64) -> Vec<IoVec> {
    let part = |(start, length): IoVec| {
        let skipped = length.min(bytes);
        bytes -= skipped;
        (skipped < length).then(|| (start.wrapping_add(skipped), length - skipped))
    };
    parts.into_iter().filter_map(part).collect()
}

/// Returns the first `bytes` bytes of a vector.
fn first_bytes(parts: Vec<IoVec>, mut bytes: u64) -> Vec<IoVec> {
    let part = |(start, length): IoVec| {
        let taken = length.min(bytes);
        bytes -= taken;
        (taken > 0).then_some((start, taken))
    };
    parts.into_iter().filter_map(part).collect()
}

/// Returns the address of the code for each thread. A thread that is in such code stays in it; others get unused code
/// or new memory.
fn continuation_addresses(
    pid: i32,
    memory: &ProcessMemory,
    callers: &[Registers],
) -> Result<Vec<u64>> {
    let maps = procfs::mappings(pid)?;
    let executable = |map: &&MapLine| {
        let protection = libc::PROT_READ | libc::PROT_EXEC;
        let anonymous = map.inode == 0 && map.name.is_empty() && !map.shared;
        anonymous && map.protection == protection && map.end - map.start == CODE_BYTES
    };
    let known = maps.iter().filter(executable).map(|map| map.start);
    let known: Vec<(u64, ContinuationData)> = known
        .filter_map(|base| Some((base, read_data(memory, base)?)))
        .collect();
    let current_code = |caller: &Registers| {
        let base = caller.continuation_start();
        known
            .iter()
            .any(|(known, _)| *known == base)
            .then_some(base)
    };
    let mut idle_code = known
        .iter()
        .filter(|(_, data)| !data.is_busy)
        .map(|(base, _)| *base);
    let mut used: Vec<(u64, u64)> = maps.iter().map(|map| (map.start, map.end)).collect();
    let mut new_code = Vec::new();
    let mut found = Vec::new();
    for caller in callers {
        if let Some(base) = current_code(caller).or_else(|| idle_code.next()) {
            found.push(base);
            continue;
        }
        let bytes = CODE_BYTES + DATA_BYTES;
        let base = free_range::find(&used, bytes)
            .ok_or_else(|| unexpected_text("no free address range"))?;
        used.push((base, base + bytes));
        new_code.push(base);
        found.push(base);
    }
    if new_code.is_empty() {
        return Ok(found);
    }
    let flags = (libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_FIXED_NOREPLACE) as u64;
    let map = |at: u64, bytes: u64, protection: i32| {
        (
            libc::SYS_mmap,
            [at, bytes, protection as u64, flags, u64::MAX, 0],
        )
    };
    let calls = new_code.iter().flat_map(|base| {
        [
            map(*base, CODE_BYTES, libc::PROT_READ | libc::PROT_EXEC),
            map(
                base + CODE_BYTES,
                DATA_BYTES,
                libc::PROT_READ | libc::PROT_WRITE,
            ),
        ]
    });
    let calls: Vec<_> = calls.collect();
    make_stubless_calls(
        Tracee { tid: pid },
        memory,
        &maps,
        read_stub_exit_signal(pid, pid)?,
        &calls,
    )?;
    for base in new_code {
        // Fails if the mapping failed.
        memory.write_protected(base, rest_code())?;
    }
    Ok(found)
}

/// Returns the data behind the code at `base`, if `base` holds this code.
fn read_data(memory: &ProcessMemory, base: u64) -> Option<ContinuationData> {
    let mut code = vec![0; rest_code().len()];
    memory.read(base, &mut code).ok()?;
    let mut bytes = [0; ContinuationData::BYTES];
    memory
        .read(base.checked_add(CODE_BYTES)?, &mut bytes)
        .ok()?;
    ContinuationData::parse(&bytes).filter(|_| code == rest_code())
}

fn read_word(bytes: &[u8], at: usize) -> u64 {
    let bytes = bytes
        .get(at..at + 8)
        .and_then(|bytes| bytes.try_into().ok());
    u64::from_ne_bytes(bytes.unwrap_or_default())
}

fn word_bytes(words: &[u64]) -> Vec<u8> {
    words.iter().flat_map(|word| word.to_ne_bytes()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn vector_continues_after_completed_bytes() {
        let parts = vec![(0x1000, 10), (0x2000, 0), (0x3000, 20)];
        assert_eq!(skip_bytes(parts.clone(), 4), [(0x1004, 6), (0x3000, 20)]);
        assert_eq!(skip_bytes(parts.clone(), 10), [(0x3000, 20)]);
        assert_eq!(skip_bytes(parts.clone(), 31), []);
        assert_eq!(first_bytes(parts, 12), [(0x1000, 10), (0x3000, 2)]);
    }
}
