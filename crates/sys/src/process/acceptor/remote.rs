//! The daemon's interface to a restorer.

use super::channel::{self, Kind, LockWord, Reply};
use super::descriptors::Handed;
use crate::process::digest::Digest;
use crate::process::error::{Context, Error, Result, check_long};
use crate::process::files::image::FileId;
use crate::process::files::{LockStep, WantedLock};
use crate::process::image::{Descriptors, Frozen, Pages, Tree, encode};
use crate::process::inspect;
use crate::process::procfs::children;
use crate::process::rights::Rights;
use crate::process::sockets::left;
use crate::process::trace::pidfd_open;
use crate::tcp_repair::{TcpDynamic, TcpStatic};
use std::borrow::Cow;
use std::collections::BTreeMap;
use std::ffi::CString;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;
use std::time::Duration;

/// Time limit for one request to a restorer.
const PATIENCE: Duration = Duration::from_secs(60);
/// Descriptor number of a restorer's channel.
pub(super) const CHANNEL: i32 = 3;
/// Descriptor number of the listening socket at which a later daemon reconnects, if there is one.
pub(super) const RETURN: i32 = 4;

/// Offsets to add to this machine's clocks so that the tree's clocks never go back.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ClockOffsets {
    /// For `CLOCK_MONOTONIC`.
    pub monotonic_ns: i64,
    /// For `CLOCK_BOOTTIME`.
    pub boot_ns: i64,
}

/// A restorer on this machine. Dropping it before [`Restorer::go`] kills the restorer and its tree; afterwards both
/// stay.
#[derive(Debug)]
pub struct Restorer {
    pub(super) channel: UnixStream,
    pub(super) process: OwnedFd,
    pid: i32,
    gone: bool,
}

impl Restorer {
    /// Starts `program` with `arguments` in new PID, IPC and mount namespaces and in the calling thread's network
    /// namespace. The program must call [`serve`](super::serve).
    ///
    /// # Errors
    /// The kernel's error; new namespaces need `CAP_SYS_ADMIN`.
    pub fn start(program: &Path, arguments: &[&str], offsets: ClockOffsets) -> Result<Self> {
        Self::start_with(program, arguments, offsets, None)
    }

    /// Starts a restorer that survives the daemon. Once the tree has all of its state ([`Restorer::frozen`]), the
    /// restorer outlives its channel and waits at `back` for another daemon ([`Restorer::adopt`]).
    ///
    /// # Errors
    /// As [`Restorer::start`].
    pub fn start_adoptable(
        program: &Path,
        arguments: &[&str],
        offsets: ClockOffsets,
        back: &UnixListener,
    ) -> Result<Self> {
        Self::start_with(program, arguments, offsets, Some(back))
    }

    fn start_with(
        program: &Path,
        arguments: &[&str],
        offsets: ClockOffsets,
        back: Option<&UnixListener>,
    ) -> Result<Self> {
        let (ours, theirs) = UnixStream::pair().context(|| "a channel".to_owned())?;
        let (pid, process) = spawn(program, arguments, &theirs, back)?;
        ours.set_read_timeout(Some(PATIENCE))
            .context(|| "a channel".to_owned())?;
        let mut restorer = Self {
            channel: ours,
            process,
            pid,
            gone: false,
        };
        restorer.ask(Kind::Start, &channel::encode_offsets(offsets))?;
        Ok(restorer)
    }

    /// Connects to the restorer of a daemon that has died, at the socket given to that restorer. Returns `None` if
    /// the tree runs already or the restorer has died too.
    ///
    /// # Errors
    /// The kernel's error.
    pub fn adopt(pid: i32, back: &Path) -> Result<Option<Self>> {
        let coming = || format!("coming back to restorer {pid}");
        let channel = match UnixStream::connect(back) {
            Err(error) if error.kind() == std::io::ErrorKind::ConnectionRefused => return Ok(None),
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(None),
            other => other.context(coming)?,
        };
        channel.set_read_timeout(Some(PATIENCE)).context(coming)?;
        Ok(Some(Self {
            channel,
            process: pidfd_open(pid)?,
            pid,
            gone: false,
        }))
    }

    /// Returns the root of the restorer's tree, in the caller's PID namespace; `None` before the root exists and
    /// after it has ended.
    ///
    /// # Errors
    /// The error of procfs.
    pub fn root(&self) -> Result<Option<i32>> {
        Ok(children(self.pid)?.first().copied())
    }

    /// Returns true if the restorer has ended after [`Restorer::go`], and with it the last process of its tree. Does
    /// not wait.
    #[must_use]
    pub fn has_ended(&self) -> bool {
        let mut poll = libc::pollfd {
            fd: self.process.as_raw_fd(),
            events: libc::POLLIN,
            revents: 0,
        };
        // SAFETY: one structure, writable for the call; if the restorer is this process's child, no other code waits
        // for it.
        unsafe {
            let ended = libc::poll(&raw mut poll, 1, 0) == 1;
            if ended {
                libc::waitpid(self.pid, std::ptr::null_mut(), libc::__WALL | libc::WNOHANG);
            }
            ended
        }
    }

    /// Returns the restorer's PID in the caller's PID namespace.
    #[must_use]
    pub fn pid(&self) -> i32 {
        self.pid
    }

    /// Returns a descriptor that becomes readable when the tree has ended (see [`Restorer::ended`]).
    #[must_use]
    pub fn readable(&self) -> BorrowedFd<'_> {
        self.channel.as_fd()
    }

    /// Limits the files that the tree may open; without a call the tree may open everything. Call this before the
    /// first tree.
    ///
    /// # Errors
    /// The restorer's error.
    pub fn rights(&mut self, rights: &Rights) -> Result<()> {
        self.ask(Kind::Rights, &encode(rights)?).map(drop)
    }

    /// Announces that the original is about to be stopped. Until the tree runs, the restorer then has a higher
    /// priority than ordinary threads of this machine, if that is permitted.
    ///
    /// # Errors
    /// The restorer's error.
    pub fn hurry(&mut self) -> Result<()> {
        self.ask(Kind::Hurry, &[]).map(drop)
    }

    /// Creates processes, threads and mappings as in `tree`, or adjusts them to `tree`. Call this before the freeze
    /// whenever they change, and in the freeze a last time.
    ///
    /// # Errors
    /// [`Error::Refused`] if this machine cannot take the tree.
    pub fn tree(&mut self, tree: &Tree) -> Result<()> {
        self.ask(Kind::Tree, &encode(tree)?).map(drop)
    }

    /// Writes memory.
    ///
    /// # Errors
    /// The restorer's error.
    pub fn pages(&mut self, pages: Pages) -> Result<()> {
        let (front, content) = pages.into_message()?;
        self.pages_message(&[front, content])
    }

    /// Writes memory from an encoded message in one or more parts. Only the restorer decodes the message.
    ///
    /// # Errors
    /// The restorer's error, also for a malformed message.
    pub fn pages_message<P: AsRef<[u8]>>(&mut self, parts: &[P]) -> Result<()> {
        self.ask_with(Kind::Pages, parts).map(drop)
    }

    /// Gives the processes their descriptors while the original runs: the result of [`Tracker::descriptors`], after
    /// the tree of the same round. `sockets` are copies of the new sockets ([`Sockets::fresh`]).
    ///
    /// [`Tracker::descriptors`]: crate::process::donor::Tracker::descriptors
    /// [`Sockets::fresh`]: crate::process::sockets::Sockets::fresh
    ///
    /// # Errors
    /// [`Error::Refused`] if this machine cannot take them; this restorer cannot be used any more.
    pub fn descriptors(
        &mut self,
        found: &Descriptors,
        sockets: &BTreeMap<FileId, BorrowedFd<'_>>,
    ) -> Result<()> {
        self.hand_over(Kind::Descriptors, found, sockets)
    }

    /// Gives the processes the stopped tree's descriptors, after its last tree and pages.
    ///
    /// # Errors
    /// As [`Self::descriptors`].
    pub fn last_descriptors(
        &mut self,
        found: &Descriptors,
        sockets: &BTreeMap<FileId, BorrowedFd<'_>>,
    ) -> Result<()> {
        self.hand_over(Kind::LastDescriptors, found, sockets)
    }

    fn hand_over(
        &mut self,
        kind: Kind,
        found: &Descriptors,
        sockets: &BTreeMap<FileId, BorrowedFd<'_>>,
    ) -> Result<()> {
        let message = Handed {
            files: Cow::Borrowed(&found.files),
            sockets: sockets.keys().copied().collect(),
        };
        let bytes = encode(&message)?;
        let fds: Vec<BorrowedFd<'_>> = sockets.values().copied().collect();
        channel::send(&mut self.channel, kind, &[bytes])
            .and_then(|()| channel::hand_over(&self.channel, &fds))
            .map_err(|error| self.lost(error))?;
        self.answer().map(drop)
    }

    /// Tests if processes and threads could get their state, as far as it is known while the original runs: the
    /// result of [`Tracker::outlook`], after the tree of the same round.
    ///
    /// [`Tracker::outlook`]: crate::process::donor::Tracker::outlook
    ///
    /// # Errors
    /// [`Error::Refused`] if this machine cannot set such a state.
    pub fn outlook(&mut self, outlook: &Frozen) -> Result<()> {
        self.ask(Kind::Outlook, &encode(outlook)?).map(drop)
    }

    /// Gives processes and threads their state, and takes their locks. The tree is then complete, and stopped.
    /// Returns the exclusive locks that another process holds, most likely one of the donor's.
    ///
    /// # Errors
    /// The restorer's error.
    pub fn frozen(&mut self, frozen: &Frozen) -> Result<Vec<WantedLock>> {
        match self.ask(Kind::Frozen, &encode(frozen)?)? {
            Reply::Locks(contended) => Ok(contended),
            _ => Ok(Vec::new()),
        }
    }

    /// Returns the locks that [`Restorer::frozen`] has returned to this daemon or an earlier one.
    ///
    /// # Errors
    /// The restorer's error.
    pub fn contended_locks(&mut self) -> Result<Vec<WantedLock>> {
        self.locks(LockWord::List)
    }

    /// Takes a step of the locks' hand-over, after the donor has. Returns the locks of which another process still
    /// holds that part.
    ///
    /// # Errors
    /// The restorer's error.
    pub fn advance_locks(&mut self, step: LockStep) -> Result<Vec<WantedLock>> {
        self.locks(LockWord::Advance(step))
    }

    /// Lets the tree be resumed without these locks.
    ///
    /// # Errors
    /// The restorer's error.
    pub fn renounce_locks(&mut self) -> Result<()> {
        self.locks(LockWord::Renounce).map(drop)
    }

    fn locks(&mut self, word: LockWord) -> Result<Vec<WantedLock>> {
        let bytes = postcard::to_stdvec(&word).map_err(|_| Error::Image("a word about locks"))?;
        match self.ask(Kind::Locks, &bytes)? {
            Reply::Locks(excluded) => Ok(excluded),
            _ => Err(Error::Image("an answer about locks")),
        }
    }

    /// Compares the restored tree, after it has its state, with the original.
    ///
    /// # Errors
    /// [`Error::Refused`] names the differences.
    pub fn compare(&mut self, original: &Digest) -> Result<()> {
        self.ask(Kind::Digest, &encode(original)?).map(drop)
    }

    /// Activates the tree's connections that an earlier daemon restored. The commit must be certain. `unfinished` are
    /// the connections that [`Sockets::unfinished`] returned to the earlier daemon.
    ///
    /// [`Sockets::unfinished`]: crate::process::sockets::Sockets::unfinished
    ///
    /// # Errors
    /// The error of procfs.
    pub fn wake(&self, unfinished: &[(TcpStatic, TcpDynamic)]) -> Result<()> {
        for pid in inspect::tree(self.pid)? {
            left::finish_all(pid, unfinished)
                .context(|| format!("connections of process {pid}"))?;
        }
        Ok(())
    }

    /// Resumes the tree. The commit must be certain, since the tree then outlives the daemon. Returns the locks that
    /// the tree has lost, because another process holds them here.
    ///
    /// # Errors
    /// The restorer's error.
    pub fn go(&mut self) -> Result<Vec<String>> {
        let reply = self.ask(Kind::Go, &[])?;
        self.gone = true;
        Ok(match reply {
            Reply::Running(unlocked) => unlocked,
            _ => Vec::new(),
        })
    }

    /// Waits for the root of the tree to end. Returns its wait status.
    ///
    /// # Errors
    /// The restorer died and its tree with it, or `limit` has passed.
    pub fn ended(&mut self, limit: Duration) -> Result<i32> {
        let waiting = || "waiting for the tree's end".to_owned();
        self.channel
            .set_read_timeout(Some(limit))
            .context(waiting)?;
        match channel::receive_answer(&mut self.channel).context(waiting)? {
            Reply::Ended(status) => Ok(status),
            other => Err(Error::Refused(format!("a restorer said {other:?}"))),
        }
    }

    pub(super) fn ask(&mut self, kind: Kind, bytes: &[u8]) -> Result<Reply> {
        self.ask_with(kind, &[bytes])
    }

    fn ask_with<P: AsRef<[u8]>>(&mut self, kind: Kind, parts: &[P]) -> Result<Reply> {
        channel::send(&mut self.channel, kind, parts).map_err(|error| self.lost(error))?;
        self.answer()
    }

    fn answer(&mut self) -> Result<Reply> {
        let answer = channel::receive_answer(&mut self.channel);
        match answer.map_err(|error| self.lost(error))? {
            reply @ (Reply::Done | Reply::Running(_) | Reply::Following(_) | Reply::Locks(_)) => {
                Ok(reply)
            }
            Reply::Refused(why) => Err(Error::Refused(why)),
            Reply::Failed(why) => Err(Error::Kernel {
                what: "in the restorer".to_owned(),
                source: std::io::Error::other(why),
            }),
            Reply::Ended(_) => Err(Error::Gone(self.pid)),
        }
    }
}

impl Drop for Restorer {
    fn drop(&mut self) {
        if self.gone {
            return;
        }
        // SAFETY: no pointers but null ones are passed; the descriptor is of this process's own child, which no other
        // code waits for.
        unsafe {
            let process = self.process.as_raw_fd();
            libc::syscall(
                libc::SYS_pidfd_send_signal,
                process,
                libc::SIGKILL,
                std::ptr::null::<()>(),
                0,
            );
            libc::waitpid(self.pid, std::ptr::null_mut(), libc::__WALL);
        }
    }
}

/// Starts a child in its own namespaces. Returns its PID and a PID file descriptor.
fn spawn(
    program: &Path,
    arguments: &[&str],
    channel: &UnixStream,
    back: Option<&UnixListener>,
) -> Result<(i32, OwnedFd)> {
    let invalid = |_| Error::Image("a NUL in the restorer's command");
    let path = CString::new(program.as_os_str().as_bytes()).map_err(invalid)?;
    let mut words = vec![path.clone()];
    for argument in arguments {
        words.push(CString::new(*argument).map_err(invalid)?);
    }
    let mut pointers: Vec<*const libc::c_char> = words.iter().map(|word| word.as_ptr()).collect();
    pointers.push(std::ptr::null());
    let environment: [*const libc::c_char; 1] = [std::ptr::null()];
    let mut process: i32 = -1;
    // SAFETY: plain numbers, for which zero is a value.
    let mut how: libc::clone_args = unsafe { std::mem::zeroed() };
    how.flags =
        (libc::CLONE_NEWPID | libc::CLONE_NEWNS | libc::CLONE_NEWIPC | libc::CLONE_PIDFD) as u64;
    how.pidfd = (&raw mut process).addr() as u64;
    how.exit_signal = libc::SIGCHLD as u64;
    // SAFETY: `how` has the kernel's layout; without CLONE_VM the child has a copy of all memory, and makes only
    // system calls until it executes the program.
    let pid = unsafe { libc::syscall(libc::SYS_clone3, &raw const how, size_of_val(&how)) };
    if pid == 0 {
        // SAFETY: all pointers are to memory that the copy has too, each list ends with a null.
        unsafe {
            // Move both out of the way first: either may have the number that the other needs.
            let high = |fd: i32| libc::fcntl(fd, libc::F_DUPFD, RETURN + 1);
            let (channel, back) = (
                high(channel.as_raw_fd()),
                back.map(|back| high(back.as_raw_fd())),
            );
            libc::dup2(channel, CHANNEL);
            let first = match back {
                Some(back) => libc::dup2(back, RETURN) + 1,
                None => RETURN,
            };
            libc::syscall(libc::SYS_close_range, first, u32::MAX, 0);
            libc::execve(path.as_ptr(), pointers.as_ptr(), environment.as_ptr());
            libc::_exit(127);
        }
    }
    check_long(pid).context(|| "making a PID and a mount namespace".to_owned())?;
    // SAFETY: the call succeeded, so the kernel has put a new descriptor here that nothing else owns.
    Ok((pid as i32, unsafe { OwnedFd::from_raw_fd(process) }))
}
