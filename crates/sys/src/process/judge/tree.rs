//! Judgement of the shape of a tree.

use super::{Judge, Verdict, require};
use crate::process::image::{
    Backing, BackingFile, Clocks, Mapping, Process, Segment, Shared, SharedKind, Tree,
};
use crate::process::procfs::Advice;
use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;

impl Judge {
    /// Checks the shape of a tree.
    ///
    /// # Errors
    /// The reason of the refusal.
    pub fn tree(&self, tree: &Tree) -> Verdict {
        let Tree {
            // The tree gets clocks of its own, and these facts only determine how the tree is created.
            clocks:
                Clocks {
                    monotonic_ns: _,
                    boot_ns: _,
                },
            boot_id: _,
            register_features: _,
            // The vDSO is code of the process itself, in its own memory.
            vdso: _,
            processes,
            files,
            shared,
        } = tree;
        for process in processes {
            self.process(process, files)?;
        }
        if self.allowed.has_root() {
            return Ok(());
        }
        for file in files {
            // Files are opened with the rights of the tree's users, and compared.
            let BackingFile {
                path: _,
                size: _,
                build_id: _,
                digest: _,
            } = file;
        }
        shared.iter().try_for_each(|object| self.shared(object))
    }

    fn process(&self, process: &Process, files: &[BackingFile]) -> Verdict {
        let Process {
            // IDs are in a PID namespace of the tree's own.
            pid: _,
            parent: _,
            generation: _,
            group: _,
            session: _,
            exit_signal: _,
            exit_status,
            threads: _,
            table_of: _,
            executable,
            mappings,
            // Guard pages are memory of the process itself, which nothing may access.
            guards: _,
            credentials,
            // The attribute is never removed.
            no_new_privileges: _,
            // The directory is entered with the rights of the process, or is below a directory of the policy.
            directory: _,
        } = process;
        if exit_status.is_none() {
            self.credentials(credentials)?;
            let file = files.get(*executable as usize);
            let path = file.map_or(&[][..], |file| &file.path);
            self.program(Path::new(OsStr::from_bytes(path)))?;
        }
        if self.allowed.has_root() {
            return Ok(());
        }
        let mut locked = 0u64;
        for mapping in mappings {
            let Mapping {
                start,
                end,
                protection: _,
                advice,
                backing,
            } = mapping;
            if Advice(*advice).has(Advice::LOCKED) {
                locked = locked.saturating_add(end.saturating_sub(*start));
            }
            match backing {
                // The process itself maps its memory; mapped files are ones that its users may open.
                Backing::Anonymous(_)
                | Backing::File {
                    file: _,
                    offset: _,
                    shared: _,
                }
                | Backing::Shared {
                    object: _,
                    offset: _,
                }
                | Backing::Kernel(_) => {}
            }
        }
        let most = self.here.limit(libc::RLIMIT_MEMLOCK);
        require(locked <= most, || {
            format!(
                "it has {locked} bytes of memory locked, of at most {most} here (RLIMIT_MEMLOCK)"
            )
        })
    }

    fn shared(&self, object: &Shared) -> Verdict {
        let Shared {
            kind,
            size,
            identity: _,
        } = object;
        match kind {
            SharedKind::Anonymous | SharedKind::Memfd(_) => Ok(()),
            // The file is opened with the rights of the tree's users.
            SharedKind::File(_) => Ok(()),
            SharedKind::Posix { path, access } => {
                let what = format!("shared memory {}", String::from_utf8_lossy(path));
                self.access(*access, &what)
            }
            SharedKind::Deleted { form, access } => self.content_of(form, *access),
            SharedKind::SystemV(segment) => {
                let Segment {
                    // Identifier and key are in an IPC namespace of the tree's own.
                    id,
                    key: _,
                    size: _,
                    mode: _,
                    removed: _,
                    locked,
                    gone: _,
                    owner,
                    creator,
                } = segment;
                let what = format!("System V memory {id}");
                self.owner(*owner, &what)?;
                self.owner(*creator, &what)?;
                let most = self.here.limit(libc::RLIMIT_MEMLOCK);
                require(!locked || *size <= most, || {
                    format!(
                        "{what} is locked, with {size} bytes of at most {most} here (RLIMIT_MEMLOCK)"
                    )
                })
            }
        }
    }
}
