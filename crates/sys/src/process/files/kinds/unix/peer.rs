//! Who was at the other end of a socket when it was connected (`SO_PEERCRED`): a server may ask at any time, and trust the user that
//! it is told. The kernel takes it from whoever connects or listens.

use crate::sockopt::{check, get_bytes};
use libc::SOL_SOCKET;
use std::io;
use std::os::fd::BorrowedFd;

/// User and group.
pub type Who = (u32, u32);

/// `SECBIT_NO_SETUID_FIXUP`: capabilities stay.
const KEEP: libc::c_ulong = 1 << 2;
/// For IDs that stay, and of a socket that has no peer.
const NONE: u32 = u32::MAX;

/// What a socket says of its peer.
pub fn of(socket: BorrowedFd<'_>) -> io::Result<Option<Who>> {
    // `struct ucred`: PID, user, group.
    let mut raw = [0u8; 12];
    get_bytes(socket, SOL_SOCKET, libc::SO_PEERCRED, &mut raw)?;
    let word = |at: usize| u32::from_ne_bytes([raw[at], raw[at + 1], raw[at + 2], raw[at + 3]]);
    Ok((word(4) != NONE).then(|| (word(4), word(8))))
}

/// Does something that the kernel then knows of this user and group, in a thread of its own where that is not who we are.
pub fn acting_as<R: Send>(
    who: Option<Who>,
    work: impl FnOnce() -> io::Result<R> + Send,
) -> io::Result<R> {
    // SAFETY: no pointers are passed.
    let own = unsafe { (libc::geteuid(), libc::getegid()) };
    let Some((user, group)) = who.filter(|who| *who != own) else {
        return work();
    };
    let run = || {
        become_user(user, group)?;
        work()
    };
    let outcome = std::thread::scope(|scope| scope.spawn(run).join());
    outcome.unwrap_or_else(|_| Err(io::Error::other("the thread that makes sockets ended")))
}

/// Of the calling thread alone: the library's functions would change all of them.
fn become_user(user: u32, group: u32) -> io::Result<()> {
    // SAFETY: no pointers are passed; what changes is the calling thread's own.
    unsafe {
        check(libc::prctl(libc::PR_SET_SECUREBITS, KEEP, 0, 0, 0))?;
        check(libc::syscall(libc::SYS_setresgid, NONE, group, NONE) as i32)?;
        check(libc::syscall(libc::SYS_setresuid, NONE, user, NONE) as i32)
    }
}
