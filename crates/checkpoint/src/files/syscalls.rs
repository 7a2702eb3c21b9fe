//! Safe wrappers for system calls that no library offers.

use holdfast_sys::sockopt::check;
use std::io;
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, IntoRawFd, OwnedFd, RawFd};

/// `KCMP_FILE`, `KCMP_FILES` and `KCMP_EPOLL_TFD` (`linux/kcmp.h`).
const KCMP_FILE: i32 = 0;
const KCMP_FILES: i32 = 2;
const KCMP_EPOLL_TFD: i32 = 7;
/// `F_SETSIG`, `F_GETSIG`, `F_SETOWN_EX`, `F_GETOWN_EX` (`asm-generic/fcntl.h`).
const F_SETSIG: i32 = 10;
const F_GETSIG: i32 = 11;
const F_SETOWN_EX: i32 = 15;
const F_GETOWN_EX: i32 = 16;
/// Kind of an owner: a process group.
pub const F_OWNER_PGRP: i32 = 2;
/// `_IOW('T', 0, u64)` (`linux/timerfd.h`).
const TFD_IOC_SET_TICKS: u64 = 0x4008_5400;

/// Order of two kernel objects, valid as long as both live.
pub use std::cmp::Ordering;

/// Compares the open files behind two descriptors of two processes.
pub fn compare_files(left: (i32, u32), right: (i32, u32)) -> io::Result<Ordering> {
    kcmp(left.0, right.0, KCMP_FILE, left.1.into(), right.1.into())
}

/// Compares the descriptor tables of two processes or threads.
pub fn compare_tables(left: i32, right: i32) -> io::Result<Ordering> {
    kcmp(left, right, KCMP_FILES, 0, 0)
}

/// Returns true if the open file `file` (process, descriptor) is the `nth` entry with number `watched` in the epoll set
/// `set`.
pub fn is_watched(file: (i32, u32), set: (i32, u32), watched: u32, nth: u32) -> io::Result<bool> {
    let slot = [set.1, watched, nth];
    let pointer = slot.as_ptr() as u64;
    let order = kcmp(file.0, set.0, KCMP_EPOLL_TFD, file.1.into(), pointer)?;
    Ok(order == Ordering::Equal)
}

fn kcmp(left: i32, right: i32, comparison: i32, first: u64, second: u64) -> io::Result<Ordering> {
    // SAFETY: the kernel reads memory only for KCMP_EPOLL_TFD, and the only caller with that request passes three
    // words that outlive the call.
    let outcome = unsafe { libc::syscall(libc::SYS_kcmp, left, right, comparison, first, second) };
    match outcome {
        0 => Ok(Ordering::Equal),
        1 => Ok(Ordering::Less),
        2 => Ok(Ordering::Greater),
        _ => Err(io::Error::last_os_error()),
    }
}

/// Returns the owner for signals (`F_GETOWN_EX`): kind and number.
pub fn owner(fd: BorrowedFd<'_>) -> io::Result<(i32, i32)> {
    let mut owner = [0i32; 2];
    // SAFETY: `owner` is writable for a `struct f_owner_ex` and outlives the call.
    check(unsafe { libc::fcntl(fd.as_raw_fd(), F_GETOWN_EX, owner.as_mut_ptr()) })?;
    Ok((owner[0], owner[1]))
}

/// Sets the owner for signals (`F_SETOWN_EX`).
pub fn set_owner(fd: BorrowedFd<'_>, kind: i32, number: i32) -> io::Result<()> {
    let owner = [kind, number];
    // SAFETY: `owner` is readable for a `struct f_owner_ex` and outlives the call.
    check(unsafe { libc::fcntl(fd.as_raw_fd(), F_SETOWN_EX, owner.as_ptr()) })
}

/// Returns the signal sent to the owner (`F_GETSIG`).
pub fn owner_signal(fd: BorrowedFd<'_>) -> io::Result<i32> {
    // SAFETY: no pointers are passed.
    let signal = unsafe { libc::fcntl(fd.as_raw_fd(), F_GETSIG) };
    check(signal).map(|()| signal)
}

/// Sets the signal sent to the owner (`F_SETSIG`).
pub fn set_owner_signal(fd: BorrowedFd<'_>, signal: i32) -> io::Result<()> {
    // SAFETY: no pointers are passed.
    check(unsafe { libc::fcntl(fd.as_raw_fd(), F_SETSIG, signal) })
}

/// Sets the status flags (`F_SETFL`).
pub fn set_status(fd: BorrowedFd<'_>, flags: u32) -> io::Result<()> {
    // SAFETY: no pointers are passed.
    check(unsafe { libc::fcntl(fd.as_raw_fd(), libc::F_SETFL, flags as i32) })
}

/// Sets or clears a record lock without waiting: `F_SETLK` for the descriptor table, `F_OFD_SETLK` for the open file.
/// `kind` is `F_RDLCK`, `F_WRLCK` or `F_UNLCK`. A `length` of 0 extends to the end of the file, however the file grows.
pub fn lock_range(
    fd: BorrowedFd<'_>,
    of_open_file: bool,
    kind: i32,
    start: i64,
    length: i64,
) -> io::Result<()> {
    // SAFETY: all-zero bytes are a valid `flock`.
    let mut lock: libc::flock = unsafe { std::mem::zeroed() };
    lock.l_type = kind as i16;
    lock.l_whence = libc::SEEK_SET as i16;
    (lock.l_start, lock.l_len) = (start, length);
    let command = if of_open_file {
        libc::F_OFD_SETLK
    } else {
        libc::F_SETLK
    };
    // SAFETY: `lock` is readable and outlives the call.
    check(unsafe { libc::fcntl(fd.as_raw_fd(), command, &raw const lock) })
}

/// Returns the handle of an open file, type and bytes; `None` if its file system has no handles.
pub fn file_handle(fd: BorrowedFd<'_>) -> Option<(i32, Vec<u8>)> {
    /// `MAX_HANDLE_SZ`.
    const BYTES_MAX: usize = 128;
    /// `AT_HANDLE_FID` asks for a handle that only identifies the file (Linux 6.6), and need not serve to open it.
    const IDENTITY_ONLY: i32 = 0x200;
    for flags in [libc::AT_EMPTY_PATH, libc::AT_EMPTY_PATH | IDENTITY_ONLY] {
        let mut raw = [0u32; 2 + BYTES_MAX / 4];
        raw[0] = BYTES_MAX as u32;
        let mut mount = 0i32;
        // SAFETY: `raw` is a `struct file_handle` with as many bytes of space as the structure says, the path ends with
        // a NUL, and all arguments outlive the call.
        let outcome = unsafe {
            libc::syscall(
                libc::SYS_name_to_handle_at,
                fd.as_raw_fd(),
                c"".as_ptr(),
                raw.as_mut_ptr(),
                &raw mut mount,
                flags,
            )
        };
        if outcome == 0 {
            let bytes = raw[2..].iter().flat_map(|word| word.to_ne_bytes());
            return Some((raw[1] as i32, bytes.take(raw[0] as usize).collect()));
        }
    }
    None
}

/// Makes descriptor number `to` refer to the open file of `fd`; a previous file at `to` is closed.
pub fn duplicate_to(fd: RawFd, to: u32, close_on_exec: bool) -> io::Result<()> {
    if fd as u32 == to {
        let flag = if close_on_exec { libc::FD_CLOEXEC } else { 0 };
        // SAFETY: no pointers are passed.
        return check(unsafe { libc::fcntl(fd, libc::F_SETFD, flag) });
    }
    let flags = if close_on_exec { libc::O_CLOEXEC } else { 0 };
    // SAFETY: no pointers are passed; the caller owns the number `to`.
    check(unsafe { libc::dup3(fd, to as i32, flags) })
}

/// Closes every descriptor from `first` to `last`, both included.
pub fn close_range(first: u32, last: u32) -> io::Result<()> {
    // SAFETY: no pointers are passed; the caller owns these numbers.
    let outcome = unsafe { libc::syscall(libc::SYS_close_range, first, last, 0) };
    check(outcome as i32)
}

/// Creates a signalfd for the signals of `mask`, bit N - 1 for signal N.
pub fn signalfd(mask: u64) -> io::Result<OwnedFd> {
    let flags = libc::SFD_CLOEXEC;
    // SAFETY: `mask` is a kernel signal set of 8 bytes and outlives the call.
    let fd = unsafe { libc::syscall(libc::SYS_signalfd4, -1, &raw const mask, 8, flags) };
    check(fd as i32)?;
    // SAFETY: the call succeeded, so this is a new descriptor that nothing else owns.
    Ok(unsafe { OwnedFd::from_raw_fd(fd as RawFd) })
}

/// Sets the number of expirations that a timerfd reports. The kernel refuses 0.
pub fn set_timerfd_expirations(fd: BorrowedFd<'_>, ticks: u64) -> io::Result<()> {
    // SAFETY: the request reads 8 bytes from the pointer, which outlives the call.
    check(unsafe { libc::ioctl(fd.as_raw_fd(), TFD_IOC_SET_TICKS, &raw const ticks) })
}

/// Makes an `ioctl` that reads or writes `value` as a whole.
pub fn ioctl<const N: usize>(
    fd: BorrowedFd<'_>,
    request: u64,
    value: &mut [u8; N],
) -> io::Result<()> {
    // SAFETY: the callers in this module pass requests with an argument of N bytes, which is readable and writable and
    // outlives the call.
    check(unsafe { libc::ioctl(fd.as_raw_fd(), request, value.as_mut_ptr()) })
}

/// Opens the file of a handle from `name_to_handle_at(2)` with `O_PATH`, on the file system of `mount`.
pub fn open_handle(mount: BorrowedFd<'_>, kind: i32, handle: &[u8]) -> io::Result<OwnedFd> {
    let mut raw = Vec::with_capacity(8 + handle.len());
    raw.extend_from_slice(&(handle.len() as u32).to_ne_bytes());
    raw.extend_from_slice(&kind.to_ne_bytes());
    raw.extend_from_slice(handle);
    let flags = libc::O_PATH | libc::O_CLOEXEC;
    let number = libc::SYS_open_by_handle_at;
    // SAFETY: `raw` is a `struct file_handle` with its bytes and outlives the call.
    let fd = unsafe { libc::syscall(number, mount.as_raw_fd(), raw.as_ptr(), flags) };
    check(fd as i32)?;
    // SAFETY: the call succeeded, so this is a new descriptor that nothing else owns.
    Ok(unsafe { OwnedFd::from_raw_fd(fd as RawFd) })
}

/// Closes descriptors; each run of consecutive numbers takes one call.
pub(crate) fn close_all(descriptors: Vec<OwnedFd>) {
    let mut numbers: Vec<RawFd> = descriptors
        .into_iter()
        .map(IntoRawFd::into_raw_fd)
        .collect();
    numbers.sort_unstable();
    for row in numbers.chunk_by(|one, next| one + 1 == *next) {
        let (first, last) = (row[0].cast_unsigned(), row[row.len() - 1].cast_unsigned());
        // A descriptor that was open is closed even if the call returns an error.
        let _ = close_range(first, last);
    }
}
