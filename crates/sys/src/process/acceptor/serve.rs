//! The restorer's main loop.

use super::channel::{self, Kind, LockWord, Reply};
use super::descriptors::Handed;
use super::locks::Contended;
use super::missing::Watched;
use super::plan::Restoration;
use super::remote::{CHANNEL, ClockOffsets, RETURN};
use crate::process::error::{Context, Error, Result, check_long};
use crate::process::files::{Stock, WantedLock};
use crate::process::following;
use crate::process::image::{PagesIn, decode};
use crate::process::sockets::left;
use std::ffi::CStr;
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::os::unix::net::{UnixListener, UnixStream};

/// Serves the channel on descriptor 3 until the tree has ended. A process started by
/// [`Restorer::start`](super::Restorer::start) must call this first of all. Returns the exit code of the process.
#[must_use]
pub fn serve() -> i32 {
    // SAFETY: the daemon that starts a restorer leaves the channel there, and no other code in this process uses it.
    let channel = unsafe { OwnedFd::from_raw_fd(CHANNEL) };
    let Ok((mut channel, back)) = make_room(channel, way_back()) else {
        return 1;
    };
    match set_up().and_then(|()| restore(&mut channel, back)) {
        Ok(Some(restoration)) => reap(restoration, channel),
        Ok(None) => 1,
        Err(error) => {
            let _ = channel::answer(&mut channel, &Reply::Failed(error.to_string()));
            1
        }
    }
}

/// Returns the listening socket for a later daemon, if this daemon has passed one.
fn way_back() -> Option<OwnedFd> {
    // SAFETY: no pointers are passed.
    let is_there = unsafe { libc::fcntl(RETURN, libc::F_GETFD) } >= 0;
    // SAFETY: the daemon that starts a restorer leaves nothing else there, and no other code in this process uses it.
    is_there.then(|| unsafe { OwnedFd::from_raw_fd(RETURN) })
}

/// Handles requests until the tree runs. Returns `None` if the daemon closed the channel before the tree was
/// complete.
fn restore(channel: &mut UnixStream, back: Option<UnixListener>) -> Result<Option<Restoration>> {
    let mut restoration = Restoration::default();
    let talking = || "the channel".to_owned();
    let mut memory = Vec::new();
    loop {
        let Some((kind, bytes)) = received(channel, &mut memory).context(talking)? else {
            match &back {
                Some(back) if restoration.is_complete() => {
                    *channel = back.accept().context(talking)?.0
                }
                _ => {
                    abandon();
                    return Ok(None);
                }
            }
            continue;
        };
        let outcome = match kind {
            Kind::Start => start(bytes),
            Kind::Rights => decode(bytes).and_then(|rights| restoration.set_rights(rights)),
            Kind::Hurry => restoration.hurry(),
            Kind::Tree => decode(bytes).and_then(|tree| restoration.tree(tree)),
            Kind::Pages => PagesIn::read(bytes).and_then(|pages| restoration.pages(&pages)),
            Kind::Outlook => decode(bytes).and_then(|outlook| restoration.outlook(&outlook)),
            Kind::Frozen => decode(bytes).and_then(|frozen| restoration.frozen(frozen)),
            Kind::Digest => decode(bytes).and_then(|theirs| restoration.compare(&theirs)),
            Kind::Missing => decode(bytes).and_then(|missing| restoration.missing(missing)),
            Kind::Follow => {
                hand_over(channel, &restoration.watched).context(talking)?;
                continue;
            }
            Kind::Descriptors | Kind::LastDescriptors => {
                let handed: Result<Handed<'_>> = decode(bytes);
                let count = handed.as_ref().map_or(0, |handed| handed.sockets.len());
                let sockets = channel::take_over(channel, count).context(talking)?;
                let last = kind == Kind::LastDescriptors;
                handed.and_then(|handed| restoration.descriptors(handed, sockets, last))
            }
            Kind::Locks => match locks(&mut restoration, bytes) {
                Ok(excluded) => {
                    match channel::answer(channel, &Reply::Locks(excluded)) {
                        Err(error) if hung_up(&error) => {}
                        other => other.context(talking)?,
                    }
                    continue;
                }
                Err(error) => Err(error),
            },
            Kind::Go => match restoration.go() {
                Ok(unlocked) => {
                    back.iter().for_each(close_way_back);
                    // The daemon may have died meanwhile.
                    let _ = channel::answer(channel, &Reply::Running(unlocked));
                    return Ok(Some(restoration));
                }
                Err(error) => Err(error),
            },
            _ => Err(Error::Image("a word for a tree that runs")),
        };
        let contended = restoration.contended.list();
        let reply = match outcome {
            Ok(()) if kind == Kind::Frozen && !contended.is_empty() => Reply::Locks(contended),
            outcome => Reply::to(outcome),
        };
        match channel::answer(channel, &reply) {
            Err(error) if hung_up(&error) => {}
            other => other.context(talking)?,
        }
        if kind == Kind::Frozen {
            restoration.prepare();
        }
    }
}

/// Handles a request about locks. Returns the locks that another process still holds.
fn locks(restoration: &mut Restoration, bytes: &[u8]) -> Result<Vec<WantedLock>> {
    match postcard::from_bytes(bytes).map_err(|_| Error::Image("a word about locks"))? {
        _ if !restoration.is_complete() => Err(Error::Image("locks before the state")),
        LockWord::List => Ok(restoration.contended.list()),
        LockWord::Advance(step) => restoration.advance_locks(step),
        LockWord::Renounce => {
            restoration.contended = Contended::default();
            Ok(Vec::new())
        }
    }
}

/// Resets the tree's connections, which may be active already. A connection that cannot be abandoned is closed as it
/// is.
fn abandon() {
    let _ = left::abandon_all(std::process::id().cast_signed());
}

/// Shuts the listening socket down, so that a later daemon cannot connect and knows that the tree runs. Closing would
/// not suffice, as empty processes may have copies.
fn close_way_back(back: &UnixListener) {
    // SAFETY: no pointers are passed.
    unsafe { libc::shutdown(back.as_raw_fd(), libc::SHUT_RDWR) };
}

/// Sends the missing ranges and the descriptors that watch them. If the daemon has closed the channel, the next
/// receive fails.
fn hand_over(channel: &mut UnixStream, watched: &Watched) -> io::Result<()> {
    let reply = Reply::Following(watched.missing.clone());
    let fds: Vec<BorrowedFd<'_>> = watched.userfaults.iter().map(AsFd::as_fd).collect();
    match channel::answer(channel, &reply).and_then(|()| channel::hand_over(channel, &fds)) {
        Err(error) if hung_up(&error) => Ok(()),
        other => other,
    }
}

/// Receives the next message; `None` if the daemon has closed the channel or died.
fn received<'a>(
    channel: &mut UnixStream,
    memory: &'a mut Vec<u8>,
) -> io::Result<Option<(Kind, &'a [u8])>> {
    match channel::receive(channel, memory) {
        Err(error) if hung_up(&error) => Ok(None),
        other => other,
    }
}

fn hung_up(error: &io::Error) -> bool {
    use io::ErrorKind::{BrokenPipe, ConnectionReset, UnexpectedEof};
    matches!(error.kind(), BrokenPipe | ConnectionReset | UnexpectedEof)
}

/// Frees all low descriptor numbers for the tree's descriptors.
fn make_room(
    channel: OwnedFd,
    back: Option<OwnedFd>,
) -> Result<(UnixStream, Option<UnixListener>)> {
    // A panic message would be written into a file of the tree.
    std::panic::set_hook(Box::new(|_| {}));
    Stock::raise_limit()?;
    let channel = Stock::lift_own(channel)?;
    let back = back.map(Stock::lift_own).transpose()?;
    let last = Stock::callers_floor()? - 1;
    // SAFETY: no pointers are passed; this process uses no descriptors but these two, which are above `last`.
    unsafe { libc::syscall(libc::SYS_close_range, 0, last, 0) };
    Ok((UnixStream::from(channel), back.map(UnixListener::from)))
}

/// Sets up a name, a session, a private mount namespace, and a `/proc` of the own PID namespace.
fn set_up() -> Result<()> {
    // A program whose session leader was the first process of its PID namespace finds a session of that number here.
    // SAFETY: no pointers are passed.
    check_long(unsafe { libc::setsid() }.into()).context(|| "a session".to_owned())?;
    let name =
        std::ffi::CString::new(crate::process::REAPER_NAME).map_err(|_| Error::Image("a name"))?;
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
fn start(bytes: &[u8]) -> Result<()> {
    let offsets = channel::decode_offsets(bytes).ok_or(Error::Image("clocks"))?;
    if offsets == ClockOffsets::default() {
        return Ok(());
    }
    let doing = || "a time namespace".to_owned();
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
fn reap(mut restoration: Restoration, mut channel: UnixStream) -> i32 {
    let root = restoration.root();
    let userfaults = std::mem::take(&mut restoration.watched.userfaults);
    if !userfaults.is_empty() {
        match channel.try_clone() {
            Ok(channel) => drop(std::thread::spawn(move || {
                following::keep(channel, userfaults)
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
            let _ = channel::answer(&mut channel, &Reply::Ended(status));
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
