//! System calls that a stop has cut short.
//!
//! To the kernel, a stop looks like a pending signal. If there is no signal after all, the kernel restarts most calls
//! by itself. Calls that return `EINTR` instead are made again. A call that has done a part of its work returns the
//! size of that part. Its thread makes the rest in [`rest_code`](crate::process::trace::rest_code), which gives the
//! program the result of the whole call. Both are arranged while the thread is stopped, so that neither a thaw, nor a
//! move, nor the death of the tracer shows the program a difference.

use super::attach::{exit_of, make_calls};
use super::gap;
use super::halt::{HaltedThread, signal_waits};
use crate::process::error::{Context, Result, unexpected};
use crate::process::procfs::{self, MapLine};
use crate::process::trace::{
    CODE_BYTES, DATA_BYTES, Memory, Registers, RestData, STRUCTURES, Tracee, pidfd_getfd,
    pidfd_open, rest_code,
};
use crate::sockopt::get_int;
use rustix::fs::{FileType, OFlags, fcntl_getfl, fstat, major, minor};
use std::os::fd::AsFd;

/// Most elements of a vector (`UIO_MAXIOV`).
const PARTS_MAX: u64 = 1024;
/// Sizes in bytes of `struct iovec`, `struct msghdr` and `struct mmsghdr`.
const PART_BYTES: usize = 16;
const HEADER_BYTES: usize = 56;
const MESSAGE_BYTES: u64 = 64;
/// Offset of the vector in `struct msghdr`: its address, then its number of elements.
const HEADER_PARTS: usize = 16;
/// Offset of control data in `struct msghdr`: their address, then their length.
const HEADER_CONTROL: usize = 32;
/// Offset of vector elements in the structures, behind a header.
const PARTS: u64 = 64;
/// `SPLICE_F_NONBLOCK`: the rest waits for space in its output, and for nothing at its input.
const SPLICE_NONBLOCK: u64 = 2;
/// Device numbers of `/dev/zero`, `/dev/random` and `/dev/urandom`. A signal ends their reads early.
const ENDLESS: [(u32, u32); 3] = [(1, 5), (1, 8), (1, 9)];

/// Makes each call that the stop has interrupted go on as if there had been no stop. All threads of the process must
/// be stopped, and `threads[0]` must be the first.
pub(super) fn go_on(pid: i32, memory: &Memory, threads: &mut [HaltedThread]) -> Result<()> {
    let mut cut = Vec::new();
    for thread in threads.iter_mut() {
        let tracee = thread.tracee;
        let registers = tracee.registers()?;
        let restarts = registers.interrupted_by_stop();
        if !restarts && !may_be_cut(&registers) {
            continue;
        }
        let mask = tracee.mask()?;
        if signal_waits(tracee, mask)? {
            continue;
        }
        let left = match restarts {
            true => Some(Left::All),
            false => Caller {
                pid,
                memory,
                registers,
            }
            .left()?,
        };
        match left {
            None => {}
            Some(Left::All) => {
                // The call had set a temporary mask, which it sets again. Give the thread its own mask back.
                tracee.set_mask(mask)?;
                tracee.set_registers(&registers.made_again())?;
                thread.if_signalled = Some(registers);
            }
            Some(Left::Rest(rest)) => cut.push((thread, registers, rest)),
        }
    }
    if cut.is_empty() {
        return Ok(());
    }
    let callers: Vec<Registers> = cut.iter().map(|(_, registers, _)| *registers).collect();
    let bases = places(pid, memory, &callers)?;
    for ((thread, registers, rest), base) in cut.into_iter().zip(bases) {
        let resumed = rest.write(memory, &registers, base)?;
        thread.tracee.set_registers(&resumed)?;
        thread.if_signalled = Some(resumed.without_rest());
    }
    Ok(())
}

/// Calls that a signal may end early, with the index of the argument that gives the requested amount, if there is
/// one.
const CUT: [(i64, Option<usize>); 15] = [
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

fn may_be_cut(registers: &Registers) -> bool {
    let (call, done) = (registers.orig_rax as i64, registers.rax as i64);
    let known = CUT.iter().find(|(known, _)| *known == call);
    let wanted = |at: &Option<usize>| at.map_or(u64::MAX, |at| registers.arguments()[at]);
    done > 0 && known.is_some_and(|(_, at)| (done as u64) < wanted(at))
}

/// Remaining work of a call that has returned early.
#[derive(Debug, PartialEq, Eq)]
enum Left {
    /// All of the work: the completed part has no effect.
    All,
    Rest(Rest),
}

/// The call that does the remaining work.
#[derive(Debug, PartialEq, Eq)]
struct Rest {
    arguments: [u64; 6],
    vector: Vector,
}

/// The remaining elements of a call's vector.
#[derive(Debug, PartialEq, Eq)]
enum Vector {
    /// The call has no vector.
    None,
    /// The second argument is the vector's address, the third its number of elements.
    Argument(Vec<Part>),
    /// The second argument is a copy of the program's header.
    Header([u8; HEADER_BYTES], Vec<Part>),
    /// The program's own header at this address, as the kernel writes into it.
    Own(u64, Vec<Part>),
}

/// Address and length in bytes of a vector element.
type Part = (u64, u64);

impl Rest {
    /// Writes the data for the code at `base`. Returns the registers with which the thread does the remaining work.
    fn write(self, memory: &Memory, before: &Registers, base: u64) -> Result<Registers> {
        let data_at = base + CODE_BYTES;
        let structures = data_at + STRUCTURES;
        let (parts_at, mut arguments) = (structures + PARTS, self.arguments);
        let earlier = (before.code_begin() == base).then(|| data(memory, base));
        let earlier = earlier.flatten();
        let mut data = earlier.unwrap_or(RestData {
            busy: true,
            done: 0,
            arguments: before.arguments(),
            target: before.rip,
            changed: (0, [0, 0]),
            number: before.orig_rax,
        });
        data.done = data.done.saturating_add(before.rax);
        let mut bytes = vec![0; STRUCTURES as usize + PARTS as usize];
        let parts = match self.vector {
            Vector::None => Vec::new(),
            Vector::Argument(parts) => {
                (arguments[1], arguments[2]) = (parts_at, parts.len() as u64);
                parts
            }
            Vector::Header(header, parts) => {
                arguments[1] = structures;
                let header_at = STRUCTURES as usize;
                bytes[header_at..header_at + HEADER_BYTES].copy_from_slice(&header);
                let told = words(&[parts_at, parts.len() as u64]);
                bytes[header_at + HEADER_PARTS..][..told.len()].copy_from_slice(&told);
                parts
            }
            Vector::Own(header, parts) => {
                let place = header.wrapping_add(HEADER_PARTS as u64);
                if earlier.is_none() {
                    let mut told = [0; 16];
                    memory.read(place, &mut told)?;
                    data.changed = (place, [word(&told, 0), word(&told, 8)]);
                }
                memory.write(place, &words(&[parts_at, parts.len() as u64]))?;
                parts
            }
        };
        let fixed = data.encode();
        bytes[..fixed.len()].copy_from_slice(&fixed);
        bytes.extend(
            parts
                .iter()
                .flat_map(|(start, length)| words(&[*start, *length])),
        );
        memory.write(data_at, &bytes)?;
        Ok(before.at_rest(base, before.orig_rax, arguments))
    }
}

/// A thread with a call that has returned less than was requested.
struct Caller<'a> {
    pid: i32,
    memory: &'a Memory,
    registers: Registers,
}

/// Type of a descriptor, as far as calls on it may be cut short.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    Pipe,
    /// A stream socket, with its `SO_RCVLOWAT`.
    Stream(u64),
    Datagrams,
    /// A terminal or another device.
    Characters,
    /// A device that never has less data than requested.
    Endless,
    Other,
}

impl Caller<'_> {
    /// Returns the remaining work; `None` if the call has returned the same result as without the stop.
    fn left(&self) -> Result<Option<Left>> {
        let [a, b, c, d, e, f] = self.registers.arguments();
        let done = self.registers.rax;
        let vector = match self.registers.orig_rax as i64 {
            libc::SYS_read
            | libc::SYS_readv
            | libc::SYS_preadv2
            | libc::SYS_recvfrom
            | libc::SYS_recvmsg => return self.left_to_read(),
            libc::SYS_write if self.takes_all(a)? => Vector::None,
            libc::SYS_sendto if waits(d) && self.is_stream(a)? => {
                return rest(
                    [a, b.wrapping_add(done), c - done, quiet(d), e, f],
                    Vector::None,
                );
            }
            libc::SYS_writev if self.takes_all(a)? => {
                Vector::Argument(skip(self.parts(b, c)?, done))
            }
            libc::SYS_pwritev2 if d == u64::MAX && f == 0 && self.takes_all(a)? => {
                Vector::Argument(skip(self.parts(b, c)?, done))
            }
            libc::SYS_sendmsg if waits(c) && self.is_stream(a)? => {
                let (mut header, parts) = self.header(b)?;
                // Control data were sent with the first byte.
                header[HEADER_CONTROL..HEADER_CONTROL + 16].fill(0);
                let vector = Vector::Header(header, skip(parts, done));
                return rest([a, b, quiet(c), d, e, f], vector);
            }
            libc::SYS_sendmmsg if waits(d) && self.kind(a)? == (Kind::Datagrams, true) => {
                return rest([a, messages(b, done), c - done, d, e, f], Vector::None);
            }
            libc::SYS_recvmmsg if self.awaits_more(d, e)? && self.kind(a)?.1 => {
                return rest([a, messages(b, done), c - done, d, e, f], Vector::None);
            }
            libc::SYS_sendfile if self.is_filled(a)? => {
                return rest([a, b, c, d - done, e, f], Vector::None);
            }
            libc::SYS_splice if self.kind(a)?.0 == Kind::Pipe && self.is_filled(c)? => {
                return rest([a, b, c, d, e - done, f | SPLICE_NONBLOCK], Vector::None);
            }
            libc::SYS_getrandom => {
                return rest([a.wrapping_add(done), b - done, c, d, e, f], Vector::None);
            }
            _ => return Ok(None),
        };
        rest(
            [a, b.wrapping_add(done), c.wrapping_sub(done), d, e, f],
            vector,
        )
    }

    /// [`Caller::left`] of a read. Most reads return the data that are available.
    fn left_to_read(&self) -> Result<Option<Left>> {
        let [a, b, c, d, e, f] = self.registers.arguments();
        let (call, done) = (self.registers.orig_rax as i64, self.registers.rax);
        let (kind, true) = self.kind(a)? else {
            return Ok(None);
        };
        let (flags, header) = match call {
            libc::SYS_recvfrom => (d, None),
            libc::SYS_recvmsg => (c, Some(self.header(b)?)),
            // Reads at a position or with flags.
            libc::SYS_preadv2 if d != u64::MAX || f != 0 => return Ok(None),
            _ => (0, None),
        };
        let flag = |flag: i32| flags & flag as u64 != 0;
        let parts = match (call, &header) {
            (libc::SYS_read | libc::SYS_recvfrom, _) => vec![(b, c)],
            // The kernel has replaced the size of the control buffer by the length of the control data, so the size
            // is lost.
            (_, Some((header, _))) if word(header, HEADER_CONTROL) != 0 => return Ok(None),
            (_, Some((_, parts))) => parts.clone(),
            _ => self.parts(b, c)?,
        };
        let all = parts
            .iter()
            .fold(0u64, |sum, (_, length)| sum.saturating_add(*length));
        let wanted = match kind {
            Kind::Endless => all,
            Kind::Stream(_) if !waits(flags) || flag(libc::MSG_OOB | libc::MSG_ERRQUEUE) => 0,
            Kind::Stream(_) if flag(libc::MSG_WAITALL) => all,
            Kind::Stream(least) => all.min(least),
            _ => 0,
        };
        if done >= wanted {
            return Ok(None);
        }
        if flag(libc::MSG_PEEK) {
            return Ok(Some(Left::All));
        }
        let parts = first(skip(parts, done), wanted - done);
        match (call, header) {
            (libc::SYS_read | libc::SYS_recvfrom, _) => {
                let arguments = [a, b.wrapping_add(done), wanted - done, d, e, f];
                rest(arguments, Vector::None)
            }
            (_, Some(_)) => rest([a, b, c, d, e, f], Vector::Own(b, parts)),
            _ => rest([a, b, c, d, e, f], Vector::Argument(parts)),
        }
    }

    /// Returns the type of a descriptor, and true if calls on it block.
    fn kind(&self, number: u64) -> Result<(Kind, bool)> {
        let process = pidfd_open(self.pid)?;
        let Ok(copy) = pidfd_getfd(process.as_fd(), number as i32) else {
            return Ok((Kind::Other, false));
        };
        let doing = || format!("descriptor {number} of process {}", self.pid);
        let stat = fstat(&copy).map_err(Into::into).context(doing)?;
        let option = |name| get_int(copy.as_fd(), libc::SOL_SOCKET, name).context(doing);
        let kind = match FileType::from_raw_mode(stat.st_mode) {
            FileType::Fifo => Kind::Pipe,
            FileType::CharacterDevice => {
                let device = (major(stat.st_rdev), minor(stat.st_rdev));
                if ENDLESS.contains(&device) {
                    Kind::Endless
                } else {
                    Kind::Characters
                }
            }
            FileType::Socket => match option(libc::SO_TYPE)? {
                libc::SOCK_STREAM => Kind::Stream(option(libc::SO_RCVLOWAT)?.max(1) as u64),
                _ => Kind::Datagrams,
            },
            _ => Kind::Other,
        };
        let flags = fcntl_getfl(&copy).map_err(Into::into).context(doing)?;
        Ok((kind, !flags.contains(OFlags::NONBLOCK)))
    }

    /// Returns true if a write to the descriptor returns less than requested only when interrupted or on an error.
    fn takes_all(&self, number: u64) -> Result<bool> {
        let (kind, waits) = self.kind(number)?;
        let takes = matches!(kind, Kind::Pipe | Kind::Stream(_) | Kind::Characters);
        Ok(takes && waits)
    }

    /// Like [`Caller::takes_all`], for calls that move data between files. A call that writes to a pipe returns when
    /// the pipe is full.
    fn is_filled(&self, number: u64) -> Result<bool> {
        let (kind, waits) = self.kind(number)?;
        Ok(matches!(kind, Kind::Stream(_) | Kind::Characters) && waits)
    }

    fn is_stream(&self, number: u64) -> Result<bool> {
        let (kind, waits) = self.kind(number)?;
        Ok(matches!(kind, Kind::Stream(_)) && waits)
    }

    /// Returns true if `recvmmsg` returns only after all messages, and its timeout has not passed.
    fn awaits_more(&self, flags: u64, timeout: u64) -> Result<bool> {
        if !waits(flags) || flags & libc::MSG_WAITFORONE as u64 != 0 {
            return Ok(false);
        }
        let mut left = [1; 16];
        if timeout != 0 {
            self.memory.read(timeout, &mut left)?;
        }
        Ok(left != [0; 16])
    }

    /// Reads a `struct msghdr` of the program and its vector.
    fn header(&self, at: u64) -> Result<([u8; HEADER_BYTES], Vec<Part>)> {
        let mut header = [0; HEADER_BYTES];
        self.memory.read(at, &mut header)?;
        let (start, count) = (word(&header, HEADER_PARTS), word(&header, HEADER_PARTS + 8));
        Ok((header, self.parts(start, count)?))
    }

    fn parts(&self, at: u64, count: u64) -> Result<Vec<Part>> {
        let mut bytes = vec![0; PART_BYTES * count.min(PARTS_MAX) as usize];
        self.memory.read(at, &mut bytes)?;
        let part = |bytes: &[u8]| (word(bytes, 0), word(bytes, 8));
        Ok(bytes.chunks_exact(PART_BYTES).map(part).collect())
    }
}

#[allow(clippy::unnecessary_wraps, reason = "all calls end so")]
fn rest(arguments: [u64; 6], vector: Vector) -> Result<Option<Left>> {
    Ok(Some(Left::Rest(Rest { arguments, vector })))
}

/// Returns true if a socket call with these flags blocks.
fn waits(flags: u64) -> bool {
    flags & libc::MSG_DONTWAIT as u64 == 0
}

/// Returns the flags for sending the rest of a message. The next call reports that the peer has closed the
/// connection.
fn quiet(flags: u64) -> u64 {
    (flags | libc::MSG_NOSIGNAL as u64) & !(libc::MSG_FASTOPEN as u64)
}

/// Returns the address of the first message that is not done.
fn messages(at: u64, done: u64) -> u64 {
    at.wrapping_add(done.wrapping_mul(MESSAGE_BYTES))
}

/// Returns a vector without its first `bytes` bytes.
fn skip(parts: Vec<Part>, mut bytes: u64) -> Vec<Part> {
    let part = |(start, length): Part| {
        let gone = length.min(bytes);
        bytes -= gone;
        (gone < length).then(|| (start.wrapping_add(gone), length - gone))
    };
    parts.into_iter().filter_map(part).collect()
}

/// Returns the first `bytes` bytes of a vector.
fn first(parts: Vec<Part>, mut bytes: u64) -> Vec<Part> {
    let part = |(start, length): Part| {
        let taken = length.min(bytes);
        bytes -= taken;
        (taken > 0).then_some((start, taken))
    };
    parts.into_iter().filter_map(part).collect()
}

/// Returns the address of the code for each thread. A thread that is in such code stays in it; others get unused code
/// or new memory.
fn places(pid: i32, memory: &Memory, callers: &[Registers]) -> Result<Vec<u64>> {
    let maps = procfs::mappings(pid)?;
    let executable = |map: &&MapLine| {
        let protection = libc::PROT_READ | libc::PROT_EXEC;
        let anonymous = map.inode == 0 && map.name.is_empty() && !map.shared;
        anonymous && map.protection == protection && map.end - map.start == CODE_BYTES
    };
    let known = maps.iter().filter(executable).map(|map| map.start);
    let known: Vec<(u64, RestData)> = known
        .filter_map(|base| Some((base, data(memory, base)?)))
        .collect();
    let has = |caller: &Registers| {
        let base = caller.code_begin();
        known
            .iter()
            .any(|(known, _)| *known == base)
            .then_some(base)
    };
    let mut idle = known
        .iter()
        .filter(|(_, data)| !data.busy)
        .map(|(base, _)| *base);
    let mut used: Vec<(u64, u64)> = maps.iter().map(|map| (map.start, map.end)).collect();
    let mut new = Vec::new();
    let mut found = Vec::new();
    for caller in callers {
        if let Some(base) = has(caller).or_else(|| idle.next()) {
            found.push(base);
            continue;
        }
        let bytes = CODE_BYTES + DATA_BYTES;
        let base = gap::find(&used, bytes).ok_or_else(|| unexpected("no free addresses"))?;
        used.push((base, base + bytes));
        new.push(base);
        found.push(base);
    }
    if new.is_empty() {
        return Ok(found);
    }
    let flags = (libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_FIXED_NOREPLACE) as u64;
    let map = |at: u64, bytes: u64, protection: i32| {
        (
            libc::SYS_mmap,
            [at, bytes, protection as u64, flags, u64::MAX, 0],
        )
    };
    let calls = new.iter().flat_map(|base| {
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
    make_calls(
        Tracee { tid: pid },
        memory,
        &maps,
        exit_of(pid, pid)?,
        &calls,
    )?;
    for base in new {
        // Fails if the mapping failed.
        memory.write_any(base, rest_code())?;
    }
    Ok(found)
}

/// Returns the data behind the code at `base`, if `base` holds this code.
fn data(memory: &Memory, base: u64) -> Option<RestData> {
    let mut code = vec![0; rest_code().len()];
    memory.read(base, &mut code).ok()?;
    let mut bytes = [0; RestData::BYTES];
    memory
        .read(base.checked_add(CODE_BYTES)?, &mut bytes)
        .ok()?;
    RestData::parse(&bytes).filter(|_| code == rest_code())
}

fn word(bytes: &[u8], at: usize) -> u64 {
    let bytes = bytes
        .get(at..at + 8)
        .and_then(|bytes| bytes.try_into().ok());
    u64::from_ne_bytes(bytes.unwrap_or_default())
}

fn words(words: &[u64]) -> Vec<u8> {
    words.iter().flat_map(|word| word.to_ne_bytes()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn vectors_go_on_behind_what_is_done() {
        let parts = vec![(0x1000, 10), (0x2000, 0), (0x3000, 20)];
        assert_eq!(skip(parts.clone(), 4), [(0x1004, 6), (0x3000, 20)]);
        assert_eq!(skip(parts.clone(), 10), [(0x3000, 20)]);
        assert_eq!(skip(parts.clone(), 31), []);
        assert_eq!(first(parts, 12), [(0x1000, 10), (0x3000, 2)]);
    }
}
