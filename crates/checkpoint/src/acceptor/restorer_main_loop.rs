//! The restorer's main loop.

use super::descriptors::DescriptorMessage;
use super::locks::ContendedLocks;
use super::missing_page_watch::MissingPageWatch;
use super::restorer::{CHANNEL_FD, ClockOffsets, RECONNECT_FD};
use super::restorer_channel::{self, LockRequest, RestorerMessageKind, RestorerReply};
use super::tree_restoration::TreeRestoration;
use crate::error::{Context, Error, Result, check_long};
use crate::files::{ContendedLock, FdStore};
use crate::image::{BorrowedPages, decode};
use crate::postcopy;
use crate::sockets::crash_recovery;
use std::ffi::CStr;
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::os::unix::net::{UnixListener, UnixStream};

/// Serves the channel on descriptor 3 until the tree has ended. A process started by
/// [`Restorer::start`](super::Restorer::start) must call this first of all. Returns the exit code of the process.
#[must_use]
pub fn run_restorer() -> i32 {
    // SAFETY: the daemon that starts a restorer leaves the channel there, and no other code in this process uses it.
    let channel = unsafe { OwnedFd::from_raw_fd(CHANNEL_FD) };
    let Ok((mut channel, back)) = move_to_high_fds(channel, reconnect_listener()) else {
        return 1;
    };
    match set_up_namespaces().and_then(|()| handle_requests(&mut channel, back)) {
        Ok(Some(restoration)) => reap_children(restoration, channel),
        Ok(None) => 1,
        Err(error) => {
            let _ = restorer_channel::send_reply(
                &mut channel,
                &RestorerReply::Failed(error.to_string()),
            );
            1
        }
    }
}

/// Returns the listening socket for a later daemon, if this daemon has passed one.
fn reconnect_listener() -> Option<OwnedFd> {
    // SAFETY: no pointers are passed.
    let is_there = unsafe { libc::fcntl(RECONNECT_FD, libc::F_GETFD) } >= 0;
    // SAFETY: the daemon that starts a restorer leaves nothing else there, and no other code in this process uses it.
    is_there.then(|| unsafe { OwnedFd::from_raw_fd(RECONNECT_FD) })
}

/// Handles requests until the tree runs. Returns `None` if the daemon closed the channel before the tree was
/// complete.
fn handle_requests(
    channel: &mut UnixStream,
    back: Option<UnixListener>,
) -> Result<Option<TreeRestoration>> {
    let mut restoration = TreeRestoration::default();
    let talking = || "channel to the daemon".to_owned();
    let mut buffer = Vec::new();
    loop {
        let Some((kind, bytes)) = receive_message(channel, &mut buffer).context(talking)? else {
            match &back {
                Some(back) if restoration.is_complete() => {
                    *channel = back.accept().context(talking)?.0
                }
                _ => {
                    reset_connections();
                    return Ok(None);
                }
            }
            continue;
        };
        let outcome = match kind {
            RestorerMessageKind::Start => set_clocks(bytes),
            RestorerMessageKind::Rights => {
                decode(bytes).and_then(|rights| restoration.set_rights(rights))
            }
            RestorerMessageKind::RaisePriority => restoration.raise_priority(),
            RestorerMessageKind::Tree => {
                decode(bytes).and_then(|tree| restoration.update_tree(tree))
            }
            RestorerMessageKind::Pages => {
                BorrowedPages::decode(bytes).and_then(|pages| restoration.write_pages(&pages))
            }
            RestorerMessageKind::StatePreview => {
                decode(bytes).and_then(|outlook| restoration.check_state_preview(&outlook))
            }
            RestorerMessageKind::State => {
                decode(bytes).and_then(|frozen| restoration.restore_state(frozen))
            }
            RestorerMessageKind::Digest => {
                decode(bytes).and_then(|theirs| restoration.compare(&theirs))
            }
            RestorerMessageKind::MissingPages => {
                decode(bytes).and_then(|missing| restoration.watch_missing_pages(missing))
            }
            RestorerMessageKind::GetUserfaults => {
                send_userfaults(channel, &restoration.missing_pages).context(talking)?;
                continue;
            }
            RestorerMessageKind::Descriptors | RestorerMessageKind::LastDescriptors => {
                let handed: Result<DescriptorMessage<'_>> = decode(bytes);
                let count = handed.as_ref().map_or(0, |handed| handed.sockets.len());
                let sockets =
                    restorer_channel::receive_descriptors(channel, count).context(talking)?;
                let last = kind == RestorerMessageKind::LastDescriptors;
                handed.and_then(|handed| restoration.update_descriptors(handed, sockets, last))
            }
            RestorerMessageKind::Locks => match handle_lock_request(&mut restoration, bytes) {
                Ok(excluded) => {
                    match restorer_channel::send_reply(channel, &RestorerReply::Locks(excluded)) {
                        Err(error) if is_disconnect(&error) => {}
                        other => other.context(talking)?,
                    }
                    continue;
                }
                Err(error) => Err(error),
            },
            RestorerMessageKind::Resume => match restoration.resume() {
                Ok(unlocked) => {
                    back.iter().for_each(close_reconnect_listener);
                    // The daemon may have died meanwhile.
                    let _ =
                        restorer_channel::send_reply(channel, &RestorerReply::Running(unlocked));
                    return Ok(Some(restoration));
                }
                Err(error) => Err(error),
            },
            _ => Err(Error::Image("unexpected message before the tree runs")),
        };
        let contended = restoration.contended_locks.list();
        let reply = match outcome {
            Ok(()) if kind == RestorerMessageKind::State && !contended.is_empty() => {
                RestorerReply::Locks(contended)
            }
            outcome => RestorerReply::from_outcome(outcome),
        };
        match restorer_channel::send_reply(channel, &reply) {
            Err(error) if is_disconnect(&error) => {}
            other => other.context(talking)?,
        }
        if kind == RestorerMessageKind::State {
            restoration.prepare_resume();
        }
    }
}

/// Handles a request about locks. Returns the locks that another process still holds.
fn handle_lock_request(
    restoration: &mut TreeRestoration,
    bytes: &[u8],
) -> Result<Vec<ContendedLock>> {
    match postcard::from_bytes(bytes).map_err(|_| Error::Image("invalid lock request"))? {
        _ if !restoration.is_complete() => {
            Err(Error::Image("a lock request came before the state"))
        }
        LockRequest::List => Ok(restoration.contended_locks.list()),
        LockRequest::Advance(step) => restoration.advance_locks(step),
        LockRequest::Renounce => {
            restoration.contended_locks = ContendedLocks::default();
            Ok(Vec::new())
        }
    }
}

/// Resets the tree's connections, which may be active already. A connection that cannot be abandoned is closed as it
/// is.
fn reset_connections() {
    let _ = crash_recovery::abandon_all(std::process::id().cast_signed());
}

/// Shuts the listening socket down, so that a later daemon cannot connect and knows that the tree runs. Closing would
/// not suffice, as stub processes may have copies.
fn close_reconnect_listener(back: &UnixListener) {
    // SAFETY: no pointers are passed.
    unsafe { libc::shutdown(back.as_raw_fd(), libc::SHUT_RDWR) };
}

/// Sends the missing ranges and the descriptors that watch them. If the daemon has closed the channel, the next
/// receive fails.
fn send_userfaults(channel: &mut UnixStream, watched: &MissingPageWatch) -> io::Result<()> {
    let reply = RestorerReply::MissingPages(watched.missing.clone());
    let fds: Vec<BorrowedFd<'_>> = watched.userfaults.iter().map(AsFd::as_fd).collect();
    match restorer_channel::send_reply(channel, &reply)
        .and_then(|()| restorer_channel::send_descriptors(channel, &fds))
    {
        Err(error) if is_disconnect(&error) => Ok(()),
        other => other,
    }
}

/// Receives the next message; `None` if the daemon has closed the channel or died.
fn receive_message<'a>(
    channel: &mut UnixStream,
    buffer: &'a mut Vec<u8>,
) -> io::Result<Option<(RestorerMessageKind, &'a [u8])>> {
    match restorer_channel::receive(channel, buffer) {
        Err(error) if is_disconnect(&error) => Ok(None),
        other => other,
    }
}

fn is_disconnect(error: &io::Error) -> bool {
    use io::ErrorKind::{BrokenPipe, ConnectionReset, UnexpectedEof};
    matches!(error.kind(), BrokenPipe | ConnectionReset | UnexpectedEof)
}

/// Frees all low descriptor numbers for the tree's descriptors.
fn move_to_high_fds(
    channel: OwnedFd,
    back: Option<OwnedFd>,
) -> Result<(UnixStream, Option<UnixListener>)> {
    // A panic message would be written into a file of the tree.
    std::panic::set_hook(Box::new(|_| {}));
    FdStore::raise_limit()?;
    let channel = FdStore::move_caller_fd_up(channel)?;
    let back = back.map(FdStore::move_caller_fd_up).transpose()?;
    let last = FdStore::caller_fd_floor()? - 1;
    // SAFETY: no pointers are passed; this process uses no descriptors but these two, which are above `last`.
    unsafe { libc::syscall(libc::SYS_close_range, 0, last, 0) };
    Ok((UnixStream::from(channel), back.map(UnixListener::from)))
}

/// Sets up a name, a session, a private mount namespace, and a `/proc` of the own PID namespace.
fn set_up_namespaces() -> Result<()> {
    // A program whose session leader was the first process of its PID namespace finds a session of that number here.
    // SAFETY: no pointers are passed.
    check_long(unsafe { libc::setsid() }.into()).context(|| "setsid".to_owned())?;
    let name = std::ffi::CString::new(crate::REAPER_NAME)
        .map_err(|_| Error::Image("invalid process name"))?;
    // SAFETY: the name ends with a NUL and outlives the call.
    unsafe { libc::prctl(libc::PR_SET_NAME, name.as_ptr()) };
    mount(c"none", c"/", None, libc::MS_REC | libc::MS_SLAVE)?;
    mount(
        c"proc",
        c"/proc",
        Some(c"proc"),
        libc::MS_NOSUID | libc::MS_NODEV | libc::MS_NOEXEC,
    )?;
    // With a private devpts, terminals of the tree keep their numbers. Without the directory, there are no terminals.
    let flags = libc::MS_NOSUID | libc::MS_NOEXEC;
    let _ = mount(c"devpts", c"/dev/pts", Some(c"devpts"), flags);
    Ok(())
}

fn mount(source: &CStr, target: &CStr, kind: Option<&CStr>, flags: libc::c_ulong) -> Result<()> {
    let kind = kind.map_or(std::ptr::null(), CStr::as_ptr);
    // SAFETY: all strings end with a NUL and outlive the call.
    let outcome = unsafe {
        libc::mount(
            source.as_ptr(),
            target.as_ptr(),
            kind,
            flags,
            std::ptr::null(),
        )
    };
    check_long(outcome.into())
        .map(drop)
        .context(|| format!("mounting {}", target.to_string_lossy()))
}

/// Sets the clocks of processes made from here on.
fn set_clocks(bytes: &[u8]) -> Result<()> {
    let offsets =
        restorer_channel::decode_offsets(bytes).ok_or(Error::Image("invalid clock offsets"))?;
    if offsets == ClockOffsets::default() {
        return Ok(());
    }
    let doing = || "setting up a time namespace".to_owned();
    // SAFETY: no pointers are passed.
    check_long(unsafe { libc::unshare(0x80) }.into()).context(doing)?;
    let line = |clock: &str, offset: i64| {
        format!(
            "{clock} {} {}\n",
            offset.div_euclid(1_000_000_000),
            offset.rem_euclid(1_000_000_000)
        )
    };
    let text = line("monotonic", offsets.monotonic_ns) + &line("boottime", offsets.boot_ns);
    std::fs::write("/proc/self/timens_offsets", text).context(doing)
}

/// Reaps all children, of the tree and orphaned ones. Reports when the root ends.
fn reap_children(mut restoration: TreeRestoration, mut channel: UnixStream) -> i32 {
    let root = restoration.root();
    let userfaults = std::mem::take(&mut restoration.missing_pages.userfaults);
    if !userfaults.is_empty() {
        match channel.try_clone() {
            Ok(channel) => drop(std::thread::spawn(move || {
                postcopy::run_userfault_watchdog(channel, userfaults)
            })),
            // When this process ends, the kernel ends the tree, and the daemon still watches the tree's memory.
            Err(_) => return 1,
        }
    }
    drop(restoration);
    let mut code = 0;
    loop {
        let mut status = 0;
        // SAFETY: `status` is writable and outlives the call.
        let pid = unsafe { libc::waitpid(-1, &raw mut status, libc::__WALL) };
        if pid == root && !libc::WIFSTOPPED(status) {
            // The daemon may have died, or been replaced by another.
            let _ = restorer_channel::send_reply(&mut channel, &RestorerReply::Ended(status));
            code = if libc::WIFEXITED(status) {
                libc::WEXITSTATUS(status)
            } else {
                128 + libc::WTERMSIG(status)
            };
        }
        if pid < 0 && io::Error::last_os_error().raw_os_error() == Some(libc::ECHILD) {
            return code;
        }
    }
}
