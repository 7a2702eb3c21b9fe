//! Credentials of the peer at the time of connection (`SO_PEERCRED`): a server may query them at any time, and trust
//! the user that is reported. The kernel takes the credentials from the process that connects or listens.

use holdfast_sys::sockopt::{check, get_bytes};
use libc::SOL_SOCKET;
use std::io;
use std::os::fd::BorrowedFd;

/// User and group.
pub type UserGroup = (u32, u32);

/// `SECBIT_NO_SETUID_FIXUP`: capabilities are kept.
const SECBIT_NO_SETUID_FIXUP: libc::c_ulong = 1 << 2;
/// ID that leaves the present one unchanged; also the ID that a socket without a peer reports.
const NO_ID: u32 = u32::MAX;

/// Returns the peer's credentials that a socket reports.
pub fn read_peer(socket: BorrowedFd<'_>) -> io::Result<Option<UserGroup>> {
    // `struct ucred`: PID, user, group.
    let mut raw = [0u8; 12];
    get_bytes(socket, SOL_SOCKET, libc::SO_PEERCRED, &mut raw)?;
    let word = |at: usize| u32::from_ne_bytes([raw[at], raw[at + 1], raw[at + 2], raw[at + 3]]);
    Ok((word(4) != NO_ID).then(|| (word(4), word(8))))
}

/// Runs `work` so that the kernel records this user and group as its caller, in a separate thread if they differ from
/// the process's own.
pub fn run_as<R: Send>(
    user_group: Option<UserGroup>,
    work: impl FnOnce() -> io::Result<R> + Send,
) -> io::Result<R> {
    // SAFETY: no pointers are passed.
    let own_ids = unsafe { (libc::geteuid(), libc::getegid()) };
    let Some((user, group)) = user_group.filter(|who| *who != own_ids) else {
        return work();
    };
    let run = || {
        become_user(user, group)?;
        work()
    };
    let outcome = std::thread::scope(|scope| scope.spawn(run).join());
    outcome.unwrap_or_else(|_| Err(io::Error::other("the thread that creates sockets panicked")))
}

/// Changes user and group of the calling thread alone: the C library's functions would change all threads.
fn become_user(user: u32, group: u32) -> io::Result<()> {
    // SAFETY: no pointers are passed; only the calling thread's own credentials change.
    unsafe {
        check(libc::prctl(
            libc::PR_SET_SECUREBITS,
            SECBIT_NO_SETUID_FIXUP,
            0,
            0,
            0,
        ))?;
        check(libc::syscall(libc::SYS_setresgid, NO_ID, group, NO_ID) as i32)?;
        check(libc::syscall(libc::SYS_setresuid, NO_ID, user, NO_ID) as i32)
    }
}
