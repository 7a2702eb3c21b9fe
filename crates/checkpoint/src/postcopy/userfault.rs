//! `userfaultfd(2)` for missing pages: a thread that touches a missing page waits until the page is present.

use crate::error::check_long;
use std::io::{self, ErrorKind};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd};

/// `_IOWR(0xaa, 0x3f, struct uffdio_api)`.
const UFFDIO_API: libc::c_ulong = 0xc018_aa3f;
/// `_IOWR(0xaa, 0, struct uffdio_register)`.
const UFFDIO_REGISTER: libc::c_ulong = 0xc020_aa00;
/// `_IOR(0xaa, 2, struct uffdio_range)`.
const UFFDIO_WAKE: libc::c_ulong = 0x8010_aa02;
/// `_IOWR(0xaa, 3, struct uffdio_copy)`.
const UFFDIO_COPY: libc::c_ulong = 0xc028_aa03;
/// `_IOWR(0xaa, 4, struct uffdio_zeropage)`.
const UFFDIO_ZEROPAGE: libc::c_ulong = 0xc020_aa04;

/// `UFFD_FEATURE_EVENT_FORK | EVENT_REMAP | EVENT_REMOVE | EVENT_UNMAP`.
const UFFD_FEATURES: u64 = 1 << 1 | 1 << 2 | 1 << 3 | 1 << 6;
/// `UFFDIO_REGISTER_MODE_MISSING`.
const UFFDIO_REGISTER_MODE_MISSING: u64 = 1;

const EVENT_PAGEFAULT: u64 = 0x12;
const EVENT_FORK: u64 = 0x13;
const EVENT_REMAP: u64 = 0x14;
const EVENT_REMOVE: u64 = 0x15;
const EVENT_UNMAP: u64 = 0x16;

/// Flags for opening: without `UFFD_USER_MODE_ONLY`, so that faults inside the kernel (as in `read(2)`) are handled
/// too.
pub(crate) const USERFAULTFD_FLAGS: i32 = libc::O_CLOEXEC | libc::O_NONBLOCK;

/// Device through which a process without capabilities gets a `userfaultfd`.
pub(crate) const USERFAULTFD_DEVICE: &str = "/dev/userfaultfd";
/// `USERFAULTFD_IOC_NEW`, `_IO(0xaa, 0)`.
pub(crate) const USERFAULTFD_IOC_NEW: u64 = 0xaa00;

/// Opens [`USERFAULTFD_DEVICE`].
pub(crate) fn open_device() -> io::Result<OwnedFd> {
    let opened = std::fs::File::options()
        .read(true)
        .write(true)
        .open(USERFAULTFD_DEVICE)?;
    Ok(opened.into())
}

/// An event in watched memory.
#[derive(Debug)]
pub(crate) enum UserfaultEvent {
    /// A thread waits for the page at this address.
    Fault(u64),
    /// The process forked a child with the same memory, which the descriptor watches.
    Fork(OwnedFd),
    /// A mapping moved: old address, new address, length in bytes.
    Remap(u64, u64, u64),
    /// A range (start, end) was discarded or is about to be unmapped.
    Remove(u64, u64),
}

/// Enables a new descriptor for missing pages. The caller needs `CAP_SYS_PTRACE`.
pub(crate) fn enable(userfault: BorrowedFd<'_>) -> io::Result<()> {
    let mut api: [u64; 3] = [0xaa, UFFD_FEATURES, 0];
    uffd_ioctl(userfault, UFFDIO_API, &mut api)
}

/// Checks that this machine supports missing-page handling.
pub(crate) fn probe() -> io::Result<()> {
    // SAFETY: no pointers are passed.
    let fd = check_long(unsafe { libc::syscall(libc::SYS_userfaultfd, USERFAULTFD_FLAGS) })?;
    // SAFETY: the call succeeded, so it is a new descriptor that nothing else owns.
    let userfault = unsafe { OwnedFd::from_raw_fd(fd as i32) };
    enable(userfault.as_fd())
}

/// Starts watching a range: a thread that touches a missing page of it waits.
pub(crate) fn register_range(userfault: BorrowedFd<'_>, start: u64, end: u64) -> io::Result<()> {
    let mut register: [u64; 4] = [start, end - start, UFFDIO_REGISTER_MODE_MISSING, 0];
    uffd_ioctl(userfault, UFFDIO_REGISTER, &mut register)
}

/// Lets threads that wait for a page of the range fault again.
pub(crate) fn wake_range(userfault: BorrowedFd<'_>, start: u64, length: u64) {
    let mut range: [u64; 2] = [start, length];
    // The call fails for no range in which a thread can wait.
    let _ = uffd_ioctl(userfault, UFFDIO_WAKE, &mut range);
}

/// Places pages where they are missing, and wakes the threads that wait for them. Returns the number of bytes placed.
///
/// # Errors
/// If not one page could be placed: `WouldBlock` while an event waits to be read, `AlreadyExists` if the page is
/// present, `NotFound` if nothing is watched there, `ESRCH` if the process has ended.
pub(crate) fn copy_pages(userfault: BorrowedFd<'_>, to: u64, bytes: &[u8]) -> io::Result<u64> {
    let from = bytes.as_ptr().addr() as u64;
    let mut copy: [u64; 5] = [to, from, bytes.len() as u64, 0, 0];
    let outcome = uffd_ioctl(userfault, UFFDIO_COPY, &mut copy);
    bytes_placed(outcome, copy[4], bytes.len() as u64)
}

/// Places pages of zeros where pages are missing, and wakes the threads that wait for them.
///
/// # Errors
/// As [`copy`].
pub(crate) fn zero_pages(userfault: BorrowedFd<'_>, at: u64, length: u64) -> io::Result<u64> {
    let mut zero: [u64; 4] = [at, length, 0, 0];
    let outcome = uffd_ioctl(userfault, UFFDIO_ZEROPAGE, &mut zero);
    bytes_placed(outcome, zero[3], length)
}

/// Converts the result of a call that may have done a part of its work.
fn bytes_placed(outcome: io::Result<()>, done: u64, requested: u64) -> io::Result<u64> {
    match outcome {
        Ok(()) => Ok(requested),
        Err(_) if (done as i64) > 0 => Ok(done),
        Err(error) => Err(error),
    }
}

/// Reads the pending events in order; empty if there are none.
pub(crate) fn read_events(userfault: BorrowedFd<'_>) -> io::Result<Vec<UserfaultEvent>> {
    /// `struct uffd_msg`: event type, then three words.
    const WORDS: usize = 4;
    let mut messages = [[0u64; WORDS]; 32];
    // SAFETY: the buffer is writable for as many bytes and outlives the call.
    let length = unsafe {
        libc::read(
            userfault.as_raw_fd(),
            messages.as_mut_ptr().cast(),
            size_of_val(&messages),
        )
    };
    let length = match check_long(length as libc::c_long) {
        Err(error) if error.kind() == ErrorKind::WouldBlock => 0,
        other => other? as usize,
    };
    let count = length / size_of::<[u64; WORDS]>();
    Ok(messages[..count].iter().filter_map(parse_event).collect())
}

fn parse_event(message: &[u64; 4]) -> Option<UserfaultEvent> {
    let [event_type, first, second, third] = *message;
    Some(match event_type & 0xff {
        // The first word of a page fault holds flags, the second the address.
        EVENT_PAGEFAULT => UserfaultEvent::Fault(second),
        // SAFETY: the kernel has just made this descriptor for the reader of the message; nothing else owns it.
        EVENT_FORK => UserfaultEvent::Fork(unsafe { OwnedFd::from_raw_fd(first as u32 as i32) }),
        EVENT_REMAP => UserfaultEvent::Remap(first, second, third),
        EVENT_REMOVE | EVENT_UNMAP => UserfaultEvent::Remove(first, second),
        _ => return None,
    })
}

fn uffd_ioctl<const WORDS: usize>(
    userfault: BorrowedFd<'_>,
    request: libc::c_ulong,
    argument: &mut [u64; WORDS],
) -> io::Result<()> {
    // SAFETY: each request's argument has the kernel's layout, all of it words, and outlives the call; so does the
    // memory that `copy` points to.
    let outcome = unsafe { libc::ioctl(userfault.as_raw_fd(), request, argument.as_mut_ptr()) };
    check_long(outcome.into()).map(drop)
}
