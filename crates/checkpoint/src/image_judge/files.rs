//! Judgement of open files, and of objects that open files share.

use super::process_state::ALARM_CLOCKS;
use super::{ImageJudge, Verdict, require};
use crate::files::image::changes::FilesImageParts;
use crate::files::image::{
    ByteString, ContentForm, EpollWatch, FileFingerprint, FileLock, InotifyWatch, LockHolder,
    NamelessContent, NetlinkSocket, OpenFile, OpenFileKind, Pipe, PseudoTerminal, SignalOwner,
    SocketOption, TimerFdState, UnixConnectionState, UnixMessage, UnixName, UnixSocket,
};
use crate::image::{DescriptorUpdate, OpenFilesUpdate};

/// Bits of a mode that give a program another user's rights.
const SET_ID_BITS: u32 = 0o6000;

impl ImageJudge {
    /// Checks the descriptors of a process.
    ///
    /// # Errors
    /// The reason of the refusal.
    pub fn check_descriptors(&self, found: &DescriptorUpdate) -> Verdict {
        let DescriptorUpdate {
            files,
            sockets,
            removed: _,
        } = found;
        if self.policy.has_root() {
            return Ok(());
        }
        sockets
            .values()
            .try_for_each(|socket| self.check_socket(socket))?;
        let FilesImageParts {
            limits,
            files,
            pipes,
            terminals,
            contents,
        } = match files {
            OpenFilesUpdate::Image(image) => image.parts(),
            OpenFilesUpdate::Changes(changes) => changes.parts(),
        };
        let highest = self.node_limits.hard_limit(libc::RLIMIT_NOFILE);
        for (soft, hard) in limits {
            require(soft <= hard && hard <= highest, || {
                format!(
                    "its limit RLIMIT_NOFILE is {soft} (hard {hard}), above this node's hard limit {highest}"
                )
            })?;
        }
        files
            .into_iter()
            .try_for_each(|file| self.check_file(file))?;
        pipes
            .into_iter()
            .try_for_each(|pipe| self.check_pipe(pipe))?;
        terminals
            .into_iter()
            .try_for_each(|terminal| self.check_terminal(terminal))?;
        contents
            .into_iter()
            .try_for_each(|content| self.check_content(content))
    }

    fn check_file(&self, file: &OpenFile) -> Verdict {
        // Files are opened with the rights of the tree's users, and with these flags.
        let OpenFile {
            flags: _,
            owner,
            locks,
            kind,
        } = file;
        if let Some(SignalOwner {
            kind: _,
            pid,
            signal: _,
        }) = owner
        {
            // The restorer, first process of the tree's PID namespace, is not part of the tree.
            require(*pid > 1, || {
                format!("process {pid} receives signals of a descriptor (F_SETOWN)")
            })?;
        }
        for FileLock {
            holder,
            write: _,
            start: _,
            end: _,
        } in locks
        {
            // Locks can only be on files that the tree has open.
            match holder {
                LockHolder::Flock | LockHolder::OpenFile | LockHolder::Table(_) => {}
            }
        }
        match kind {
            // Paths are opened with the rights of the tree's users.
            OpenFileKind::Regular {
                path: _,
                offset: _,
                fingerprint: stamp,
            } => {
                if let Some(FileFingerprint {
                    size: _,
                    mode: _,
                    modified_ns: _,
                    identity: _,
                    digest: _,
                }) = stamp
                {}
                Ok(())
            }
            OpenFileKind::Directory { path: _, offset: _ }
            | OpenFileKind::Path { path: _ }
            | OpenFileKind::Device { path: _, device: _ } => Ok(()),
            OpenFileKind::Inotify { watches } => {
                for InotifyWatch { path: _, mask: _ } in watches.values() {}
                Ok(())
            }
            // Objects of the tree itself, which are judged separately.
            OpenFileKind::Content {
                content: _,
                offset: _,
            }
            | OpenFileKind::Pipe { pipe: _ }
            | OpenFileKind::TerminalMaster { terminal: _ }
            | OpenFileKind::TerminalSlave { terminal: _ }
            | OpenFileKind::Event {
                count: _,
                semaphore: _,
            }
            | OpenFileKind::Signal { mask: _ }
            | OpenFileKind::Pidfd { pid: _ } => Ok(()),
            OpenFileKind::Epoll { watches } => {
                for EpollWatch {
                    fd: _,
                    file: _,
                    events,
                    data: _,
                } in watches
                {
                    let keeps_awake = events & libc::EPOLLWAKEUP.cast_unsigned() != 0;
                    require(!keeps_awake, || {
                        "it keeps the machine awake (EPOLLWAKEUP)".to_owned()
                    })?;
                }
                Ok(())
            }
            OpenFileKind::Timer(TimerFdState {
                clock,
                set_flags: _,
                value_ns: _,
                interval_ns: _,
                ticks: _,
            }) => require(!ALARM_CLOCKS.contains(clock), || {
                format!("a timerfd wakes the machine (clock {clock})")
            }),
            OpenFileKind::Unix(socket) => self.check_unix_socket(socket),
            OpenFileKind::Netlink(NetlinkSocket {
                socket: _,
                port: _,
                groups: _,
                options,
                // Any process may attach a classic filter.
                filter: _,
            }) => self.check_options(options),
            // Sockets are judged separately, by `socket`.
            OpenFileKind::Inet {
                family: _,
                socket: _,
                protocol: _,
                inode: _,
            } => Ok(()),
        }
    }

    fn check_unix_socket(&self, socket: &UnixSocket) -> Verdict {
        let UnixSocket {
            socket: _,
            name,
            link,
            owner,
            peer,
            shutdown: _,
            options,
            // Any process may attach a classic filter.
            filter: _,
            queue,
        } = socket;
        match name {
            UnixName::None | UnixName::Abstract(_) => {}
            // A path is bound with the rights of the tree's users.
            UnixName::Path {
                name,
                file: _,
                access: (user, group, mode),
            } => {
                let what = format!("socket {name}");
                self.check_owner((*user, *group), &what)?;
                require(mode & SET_ID_BITS == 0, || {
                    format!("{what} has mode {mode:o}")
                })?;
            }
        }
        match link {
            UnixConnectionState::Unconnected
            | UnixConnectionState::Peer(_)
            // A service is connected with the rights of the tree's users.
            | UnixConnectionState::Service(_)
            | UnixConnectionState::PeerClosed
            | UnixConnectionState::Listening(_)
            | UnixConnectionState::PendingAccept(_, _) => {}
        }
        // A process that connects sees this owner.
        self.check_owner(*owner, "creator of a Unix socket")?;
        // Only processes of the tree see these credentials of each other.
        let _ = peer;
        for UnixMessage {
            bytes: _,
            files: _,
            credentials: _,
            sender_name: _,
        } in queue
        {}
        self.check_options(options)
    }

    fn check_options(&self, options: &[SocketOption]) -> Verdict {
        for SocketOption {
            level,
            name,
            value: ByteString(value),
        } in options
        {
            let first = value
                .first_chunk()
                .map_or(0, |bytes| i32::from_ne_bytes(*bytes));
            self.check_option((*level, *name), first)?;
        }
        Ok(())
    }

    fn check_pipe(&self, pipe: &Pipe) -> Verdict {
        let Pipe {
            // A FIFO is opened with the rights of the tree's users, and keeps its owner.
            path: _,
            capacity,
            chunks: _,
            packet_mode: _,
            // The owner of a pipe gives no process a right: programs that drop root's rights keep pipes that they made
            // as root.
            access: _,
        } = pipe;
        let largest = self.node_limits.pipe_max;
        require(*capacity <= largest, || {
            format!("a pipe has a capacity of {capacity} bytes, above this node's limit {largest}")
        })
    }

    fn check_terminal(&self, terminal: &PseudoTerminal) -> Verdict {
        let PseudoTerminal {
            modes: _,
            window: _,
            locked: _,
            packet_mode: _,
            exclusive: _,
            session: _,
            // The group may be the group of terminals: this terminal is in the tree's own file system.
            access: (user, _, mode),
        } = terminal;
        self.check_user(*user)
            .map_err(|why| format!("a terminal: {why}"))?;
        require(mode & SET_ID_BITS == 0, || {
            format!("a terminal has mode {mode:o}")
        })
    }

    fn check_content(&self, content: &NamelessContent) -> Verdict {
        let NamelessContent {
            form,
            access,
            times_ns: _,
            size: _,
            mapped_memory: _,
            chunks: _,
        } = content;
        self.check_content_form(form, *access)
    }

    /// Judges content without a name, with this owner, group and mode.
    pub(super) fn check_content_form(
        &self,
        form: &ContentForm,
        access: (u32, u32, u32),
    ) -> Verdict {
        let what = match form {
            ContentForm::Memory { name, seals: _ } => format!("memory file {name}"),
            // The file is created with the rights of the tree's users.
            ContentForm::Deleted { path } => format!("deleted file {path}"),
            ContentForm::Temporary { directory } => format!("a file without a name in {directory}"),
        };
        self.check_access(access, &what)
    }

    /// Judges owner, group and mode of a file that is created.
    pub(super) fn check_access(&self, (user, group, mode): (u32, u32, u32), what: &str) -> Verdict {
        self.check_owner((user, group), what)?;
        require(mode & SET_ID_BITS == 0, || {
            format!("{what} has mode {mode:o}")
        })
    }
}
