//! Judgement of the shape of a tree.

use super::{ImageJudge, Verdict, require};
use crate::image::{
    BackingFile, ClockReadings, MappingBacking, MemoryMapping, ProcessLayout, SharedMemory,
    SharedMemoryKind, SystemVSegment, TreeLayout,
};
use crate::procfs::VmFlags;
use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;

impl ImageJudge {
    /// Checks the shape of a tree.
    ///
    /// # Errors
    /// The reason of the refusal.
    pub fn check_tree(&self, tree: &TreeLayout) -> Verdict {
        let TreeLayout {
            // The tree gets clocks of its own, and these facts only determine how the tree is created.
            clocks:
                ClockReadings {
                    monotonic_ns: _,
                    boot_ns: _,
                },
            boot_id: _,
            xcr0: _,
            // The vDSO is code of the process itself, in its own memory.
            vdso: _,
            processes,
            files,
            shared_memory: shared,
        } = tree;
        for process in processes {
            self.check_process(process, files)?;
        }
        if self.policy.has_root() {
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
        shared
            .iter()
            .try_for_each(|object| self.check_shared_memory(object))
    }

    fn check_process(&self, process: &ProcessLayout, files: &[BackingFile]) -> Verdict {
        let ProcessLayout {
            // IDs are in a PID namespace of the tree's own.
            pid: _,
            parent: _,
            generation: _,
            group: _,
            session: _,
            exit_signal: _,
            exit_status,
            threads: _,
            shares_table_with: _,
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
            self.check_credentials(credentials)?;
            let file = files.get(*executable as usize);
            let path = file.map_or(&[][..], |file| &file.path);
            self.check_program(Path::new(OsStr::from_bytes(path)))?;
        }
        if self.policy.has_root() {
            return Ok(());
        }
        let mut locked = 0u64;
        for mapping in mappings {
            let MemoryMapping {
                start,
                end,
                protection: _,
                advice,
                backing,
            } = mapping;
            if VmFlags(*advice).has_any(VmFlags::LOCKED) {
                locked = locked.saturating_add(end.saturating_sub(*start));
            }
            match backing {
                // The process itself maps its memory; mapped files are ones that its users may open.
                MappingBacking::Anonymous(_)
                | MappingBacking::File {
                    file: _,
                    offset: _,
                    shared: _,
                }
                | MappingBacking::Shared {
                    object: _,
                    offset: _,
                }
                | MappingBacking::Kernel(_) => {}
            }
        }
        let highest = self.node_limits.hard_limit(libc::RLIMIT_MEMLOCK);
        require(locked <= highest, || {
            format!(
                "it has {locked} bytes of memory locked, above this node's limit {highest} (RLIMIT_MEMLOCK)"
            )
        })
    }

    fn check_shared_memory(&self, object: &SharedMemory) -> Verdict {
        let SharedMemory {
            kind,
            size,
            identity: _,
        } = object;
        match kind {
            SharedMemoryKind::Anonymous | SharedMemoryKind::Memfd(_) => Ok(()),
            // The file is opened with the rights of the tree's users.
            SharedMemoryKind::File(_) => Ok(()),
            SharedMemoryKind::Posix { path, access } => {
                let what = format!("shared memory {}", String::from_utf8_lossy(path));
                self.check_access(*access, &what)
            }
            SharedMemoryKind::Deleted { form, access } => self.check_content_form(form, *access),
            SharedMemoryKind::SystemV(segment) => {
                let SystemVSegment {
                    // Identifier and key are in an IPC namespace of the tree's own.
                    id,
                    key: _,
                    size: _,
                    mode: _,
                    is_marked_removed: _,
                    is_locked: locked,
                    is_gone: _,
                    owner,
                    creator,
                } = segment;
                let what = format!("System V memory {id}");
                self.check_owner(*owner, &what)?;
                self.check_owner(*creator, &what)?;
                let highest = self.node_limits.hard_limit(libc::RLIMIT_MEMLOCK);
                require(!locked || *size <= highest, || {
                    format!(
                        "{what} is locked, with {size} bytes, above this node's limit {highest} (RLIMIT_MEMLOCK)"
                    )
                })
            }
        }
    }
}
