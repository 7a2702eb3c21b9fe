//! The daemon's interface to a restorer.

use super::descriptors::DescriptorMessage;
use super::restorer_channel::{self, LockRequest, RestorerMessageKind, RestorerReply};
use crate::digest::TreeDigest;
use crate::error::{Context, Error, Result, check_long};
use crate::file_rights::FileRights;
use crate::files::image::FileId;
use crate::files::{ContendedLock, LockHandoverStep};
use crate::image::{DescriptorUpdate, PagesMessage, ProcessTreeState, TreeLayout, encode};
use crate::inspect;
use crate::procfs::children;
use crate::sockets::crash_recovery;
use crate::trace::pidfd_open;
use holdfast_tcp_repair::{TcpDynamicState, TcpStaticState};
use std::borrow::Cow;
use std::collections::BTreeMap;
use std::ffi::CString;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;
use std::time::Duration;

/// Time limit for one request to a restorer.
const REQUEST_TIMEOUT: Duration = Duration::from_secs(60);
/// Descriptor number of a restorer's channel.
pub(super) const CHANNEL_FD: i32 = 3;
/// Descriptor number of the listening socket at which a later daemon reconnects, if there is one.
pub(super) const RECONNECT_FD: i32 = 4;

/// Offsets to add to this machine's clocks so that the tree's clocks never go back.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ClockOffsets {
    /// For `CLOCK_MONOTONIC`.
    pub monotonic_ns: i64,
    /// For `CLOCK_BOOTTIME`.
    pub boot_ns: i64,
}

/// A restorer on this machine. Dropping it before [`Restorer::resume`] kills the restorer and its tree; afterwards both
/// stay.
#[derive(Debug)]
pub struct Restorer {
    pub(super) channel: UnixStream,
    pub(super) process: OwnedFd,
    pid: i32,
    is_detached: bool,
}

impl Restorer {
    /// Starts `program` with `arguments` in new PID, IPC and mount namespaces and in the calling thread's network
    /// namespace. The program must call [`run_restorer`](super::run_restorer).
    ///
    /// # Errors
    /// The kernel's error; new namespaces need `CAP_SYS_ADMIN`.
    pub fn start(program: &Path, arguments: &[&str], offsets: ClockOffsets) -> Result<Self> {
        Self::start_with(program, arguments, offsets, None)
    }

    /// Starts a restorer that survives the daemon. Once the tree has all of its state ([`Restorer::restore_state`]), the
    /// restorer outlives its channel and waits at `back` for another daemon ([`Restorer::adopt`]).
    ///
    /// # Errors
    /// As [`Restorer::start`].
    pub fn start_adoptable(
        program: &Path,
        arguments: &[&str],
        offsets: ClockOffsets,
        reconnect: &UnixListener,
    ) -> Result<Self> {
        Self::start_with(program, arguments, offsets, Some(reconnect))
    }

    fn start_with(
        program: &Path,
        arguments: &[&str],
        offsets: ClockOffsets,
        reconnect: Option<&UnixListener>,
    ) -> Result<Self> {
        let (ours, theirs) =
            UnixStream::pair().context(|| "opening a channel to the restorer".to_owned())?;
        let (pid, process) = spawn(program, arguments, &theirs, reconnect)?;
        ours.set_read_timeout(Some(REQUEST_TIMEOUT))
            .context(|| "opening a channel to the restorer".to_owned())?;
        let mut restorer = Self {
            channel: ours,
            process,
            pid,
            is_detached: false,
        };
        restorer.request(
            RestorerMessageKind::Start,
            &restorer_channel::encode_offsets(offsets),
        )?;
        Ok(restorer)
    }

    /// Connects to the restorer of a daemon that has died, at the socket given to that restorer. Returns `None` if
    /// the tree runs already or the restorer has died too.
    ///
    /// # Errors
    /// The kernel's error.
    pub fn adopt(pid: i32, reconnect: &Path) -> Result<Option<Self>> {
        let reconnecting = || format!("reconnecting to restorer {pid}");
        let channel = match UnixStream::connect(reconnect) {
            Err(error) if error.kind() == std::io::ErrorKind::ConnectionRefused => return Ok(None),
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(None),
            other => other.context(reconnecting)?,
        };
        channel
            .set_read_timeout(Some(REQUEST_TIMEOUT))
            .context(reconnecting)?;
        Ok(Some(Self {
            channel,
            process: pidfd_open(pid)?,
            pid,
            is_detached: false,
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

    /// Returns true if the restorer has ended after [`Restorer::resume`], and with it the last process of its tree. Does
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

    /// Returns a descriptor that becomes readable when the tree has ended (see [`Restorer::has_ended`]).
    #[must_use]
    pub fn end_notifier(&self) -> BorrowedFd<'_> {
        self.channel.as_fd()
    }

    /// Limits the files that the tree may open; without a call the tree may open everything. Call this before the
    /// first tree.
    ///
    /// # Errors
    /// The restorer's error.
    pub fn set_rights(&mut self, rights: &FileRights) -> Result<()> {
        self.request(RestorerMessageKind::Rights, &encode(rights)?)
            .map(drop)
    }

    /// Announces that the original is about to be stopped. Until the tree runs, the restorer then has a higher
    /// priority than ordinary threads of this machine, if that is permitted.
    ///
    /// # Errors
    /// The restorer's error.
    pub fn raise_priority(&mut self) -> Result<()> {
        self.request(RestorerMessageKind::RaisePriority, &[])
            .map(drop)
    }

    /// Creates processes, threads and mappings as in `tree`, or adjusts them to `tree`. Call this before the freeze
    /// whenever they change, and in the freeze a last time.
    ///
    /// # Errors
    /// [`Error::Refused`] if this machine cannot take the tree.
    pub fn update_tree(&mut self, tree: &TreeLayout) -> Result<()> {
        self.request(RestorerMessageKind::Tree, &encode(tree)?)
            .map(drop)
    }

    /// Has the restorer write memory pages into the stub processes.
    ///
    /// # Errors
    /// The restorer's error.
    pub fn write_pages(&mut self, pages: PagesMessage) -> Result<()> {
        let (front, content) = pages.into_message()?;
        self.write_pages_message(&[front, content])
    }

    /// Has the restorer write the memory pages of an encoded message, given in parts. Only the restorer decodes it.
    ///
    /// # Errors
    /// The restorer's error, also for a malformed message.
    pub fn write_pages_message<P: AsRef<[u8]>>(&mut self, parts: &[P]) -> Result<()> {
        self.request_in_parts(RestorerMessageKind::Pages, parts)
            .map(drop)
    }

    /// Gives the processes their descriptors while the original runs: the result of [`TreeTracker::read_descriptors`], after
    /// the tree of the same round. `sockets` are copies of the new sockets ([`Sockets::new_sockets`]).
    ///
    /// [`TreeTracker::read_descriptors`]: crate::donor::TreeTracker::read_descriptors
    /// [`Sockets::new_sockets`]: crate::sockets::RestoredSockets::new_sockets
    ///
    /// # Errors
    /// [`Error::Refused`] if this machine cannot take them; this restorer cannot be used any more.
    pub fn update_descriptors(
        &mut self,
        found: &DescriptorUpdate,
        sockets: &BTreeMap<FileId, BorrowedFd<'_>>,
    ) -> Result<()> {
        self.send_descriptors(RestorerMessageKind::Descriptors, found, sockets)
    }

    /// Gives the processes the stopped tree's descriptors, after its last tree and pages.
    ///
    /// # Errors
    /// As [`Self::update_descriptors`].
    pub fn finish_descriptors(
        &mut self,
        found: &DescriptorUpdate,
        sockets: &BTreeMap<FileId, BorrowedFd<'_>>,
    ) -> Result<()> {
        self.send_descriptors(RestorerMessageKind::LastDescriptors, found, sockets)
    }

    fn send_descriptors(
        &mut self,
        kind: RestorerMessageKind,
        found: &DescriptorUpdate,
        sockets: &BTreeMap<FileId, BorrowedFd<'_>>,
    ) -> Result<()> {
        let message = DescriptorMessage {
            files: Cow::Borrowed(&found.files),
            sockets: sockets.keys().copied().collect(),
        };
        let bytes = encode(&message)?;
        let fds: Vec<BorrowedFd<'_>> = sockets.values().copied().collect();
        restorer_channel::send(&mut self.channel, kind, &[bytes])
            .and_then(|()| restorer_channel::send_descriptors(&self.channel, &fds))
            .map_err(|error| self.failure(error))?;
        self.receive_reply().map(drop)
    }

    /// Tests if processes and threads could get their state, as far as it is known while the original runs: the
    /// result of [`TreeTracker::preview_state`], after the tree of the same round.
    ///
    /// [`TreeTracker::preview_state`]: crate::donor::TreeTracker::preview_state
    ///
    /// # Errors
    /// [`Error::Refused`] if this machine cannot set such a state.
    pub fn check_state_preview(&mut self, preview: &ProcessTreeState) -> Result<()> {
        self.request(RestorerMessageKind::StatePreview, &encode(preview)?)
            .map(drop)
    }

    /// Gives processes and threads their state, and takes their locks. The tree is then complete, and stopped.
    /// Returns the exclusive locks that another process holds, most likely one of the donor's.
    ///
    /// # Errors
    /// The restorer's error.
    pub fn restore_state(&mut self, frozen: &ProcessTreeState) -> Result<Vec<ContendedLock>> {
        match self.request(RestorerMessageKind::State, &encode(frozen)?)? {
            RestorerReply::Locks(contended) => Ok(contended),
            _ => Ok(Vec::new()),
        }
    }

    /// Returns the locks that [`Restorer::restore_state`] has returned to this daemon or an earlier one.
    ///
    /// # Errors
    /// The restorer's error.
    pub fn contended_locks(&mut self) -> Result<Vec<ContendedLock>> {
        self.request_locks(LockRequest::List)
    }

    /// Takes a step of the locks' hand-over, after the donor has. Returns the locks of which another process still
    /// holds that part.
    ///
    /// # Errors
    /// The restorer's error.
    pub fn advance_locks(&mut self, step: LockHandoverStep) -> Result<Vec<ContendedLock>> {
        self.request_locks(LockRequest::Advance(step))
    }

    /// Lets the tree be resumed without these locks.
    ///
    /// # Errors
    /// The restorer's error.
    pub fn renounce_locks(&mut self) -> Result<()> {
        self.request_locks(LockRequest::Renounce).map(drop)
    }

    fn request_locks(&mut self, request: LockRequest) -> Result<Vec<ContendedLock>> {
        let bytes =
            postcard::to_stdvec(&request).map_err(|_| Error::Image("invalid lock request"))?;
        match self.request(RestorerMessageKind::Locks, &bytes)? {
            RestorerReply::Locks(excluded) => Ok(excluded),
            _ => Err(Error::Image("unexpected reply to a lock request")),
        }
    }

    /// Compares the restored tree, after it has its state, with the original.
    ///
    /// # Errors
    /// [`Error::Refused`] names the differences.
    pub fn compare_digest(&mut self, original: &TreeDigest) -> Result<()> {
        self.request(RestorerMessageKind::Digest, &encode(original)?)
            .map(drop)
    }

    /// Activates the tree's connections that an earlier daemon restored. The commit must be certain. `unfinished` are
    /// the connections that [`Sockets::unfinished`] returned to the earlier daemon.
    ///
    /// [`Sockets::unfinished`]: crate::sockets::RestoredSockets::unfinished
    ///
    /// # Errors
    /// The error of procfs.
    pub fn activate_connections(
        &self,
        unfinished: &[(TcpStaticState, TcpDynamicState)],
    ) -> Result<()> {
        for pid in inspect::tree_pids(self.pid)? {
            crash_recovery::activate_restored(pid, unfinished)
                .context(|| format!("activating connections of process {pid}"))?;
        }
        Ok(())
    }

    /// Resumes the tree. The commit must be certain, since the tree then outlives the daemon. Returns the locks that
    /// the tree has lost, because another process holds them here.
    ///
    /// # Errors
    /// The restorer's error.
    pub fn resume(&mut self) -> Result<Vec<String>> {
        let reply = self.request(RestorerMessageKind::Resume, &[])?;
        self.is_detached = true;
        Ok(match reply {
            RestorerReply::Running(unlocked) => unlocked,
            _ => Vec::new(),
        })
    }

    /// Waits for the root of the tree to end. Returns its wait status.
    ///
    /// # Errors
    /// The restorer died and its tree with it, or `limit` has passed.
    pub fn wait_for_end(&mut self, limit: Duration) -> Result<i32> {
        let waiting = || "waiting for the tree's end".to_owned();
        self.channel
            .set_read_timeout(Some(limit))
            .context(waiting)?;
        match restorer_channel::receive_reply(&mut self.channel).context(waiting)? {
            RestorerReply::Ended(status) => Ok(status),
            other => Err(Error::Refused(format!(
                "unexpected reply of the restorer: {other:?}"
            ))),
        }
    }

    pub(super) fn request(
        &mut self,
        kind: RestorerMessageKind,
        bytes: &[u8],
    ) -> Result<RestorerReply> {
        self.request_in_parts(kind, &[bytes])
    }

    fn request_in_parts<P: AsRef<[u8]>>(
        &mut self,
        kind: RestorerMessageKind,
        parts: &[P],
    ) -> Result<RestorerReply> {
        restorer_channel::send(&mut self.channel, kind, parts)
            .map_err(|error| self.failure(error))?;
        self.receive_reply()
    }

    fn receive_reply(&mut self) -> Result<RestorerReply> {
        let answer = restorer_channel::receive_reply(&mut self.channel);
        match answer.map_err(|error| self.failure(error))? {
            reply @ (RestorerReply::Done
            | RestorerReply::Running(_)
            | RestorerReply::MissingPages(_)
            | RestorerReply::Locks(_)) => Ok(reply),
            RestorerReply::Refused(why) => Err(Error::Refused(why)),
            RestorerReply::Failed(why) => Err(Error::Kernel {
                operation: "restorer".to_owned(),
                source: std::io::Error::other(why),
            }),
            RestorerReply::Ended(_) => Err(Error::ProcessEnded(self.pid)),
        }
    }
}

impl Drop for Restorer {
    fn drop(&mut self) {
        if self.is_detached {
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
    reconnect: Option<&UnixListener>,
) -> Result<(i32, OwnedFd)> {
    let invalid = |_| Error::Image("the restorer's command contains a NUL byte");
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
    let mut clone_args: libc::clone_args = unsafe { std::mem::zeroed() };
    clone_args.flags =
        (libc::CLONE_NEWPID | libc::CLONE_NEWNS | libc::CLONE_NEWIPC | libc::CLONE_PIDFD) as u64;
    clone_args.pidfd = (&raw mut process).addr() as u64;
    clone_args.exit_signal = libc::SIGCHLD as u64;
    // SAFETY: `clone_args` has the kernel's layout; without CLONE_VM the child has a copy of all memory, and makes only
    // system calls until it executes the program.
    let pid = unsafe {
        libc::syscall(
            libc::SYS_clone3,
            &raw const clone_args,
            size_of_val(&clone_args),
        )
    };
    if pid == 0 {
        // SAFETY: all pointers are to memory that the copy has too, each list ends with a null.
        unsafe {
            // Move both out of the way first: either may have the number that the other needs.
            let duplicate_high = |fd: i32| libc::fcntl(fd, libc::F_DUPFD, RECONNECT_FD + 1);
            let (channel, back) = (
                duplicate_high(channel.as_raw_fd()),
                reconnect.map(|back| duplicate_high(back.as_raw_fd())),
            );
            libc::dup2(channel, CHANNEL_FD);
            let first = match back {
                Some(back) => libc::dup2(back, RECONNECT_FD) + 1,
                None => RECONNECT_FD,
            };
            libc::syscall(libc::SYS_close_range, first, u32::MAX, 0);
            libc::execve(path.as_ptr(), pointers.as_ptr(), environment.as_ptr());
            libc::_exit(127);
        }
    }
    check_long(pid)
        .context(|| "creating the restorer's PID, mount and IPC namespaces".to_owned())?;
    // SAFETY: the call succeeded, so the kernel has put a new descriptor here that nothing else owns.
    Ok((pid as i32, unsafe { OwnedFd::from_raw_fd(process) }))
}
