//! Checks of an image for constraints that the types cannot express.

use super::{
    ADDRESS_END, MappingBacking, MemoryMapping, PAGE, POSIX_MEMORY_DIRECTORY, PageContent, PageRun,
    ProcessLayout, ProcessState, ProcessTreeState, SharedMemoryKind, ThreadState, TreeLayout,
    Validate,
};
use crate::address_ranges::AddressRanges;
use crate::error::{Error, Result};
use crate::file_rights::FileRights;
use crate::files::image::ContentForm;
use std::collections::HashSet;

/// Most processes of a tree.
const PROCESSES_MAX: usize = 4096;
/// Most threads of a process.
const THREADS_MAX: usize = 32768;
/// Most mappings of a process (the kernel's default limit is 65,530).
const MAPPINGS_MAX: usize = 1 << 18;
/// Most bytes of guard pages of a process: one page of the kernel's page tables covers 512 guard pages.
const GUARD_BYTES_MAX: u64 = 1 << 36;
/// Most bytes of a path.
const PATH_MAX: usize = 4096;
/// Signals of job control that stop a process.
const STOP_SIGNALS: [i32; 4] = [libc::SIGSTOP, libc::SIGTSTP, libc::SIGTTIN, libc::SIGTTOU];
/// Largest PID that the kernel assigns (`PID_MAX_LIMIT`).
const PID_MAX: i32 = 1 << 22;

fn ensure(is_valid: bool, what: &'static str) -> Result<()> {
    if is_valid {
        Ok(())
    } else {
        Err(Error::Image(what))
    }
}

impl Validate for TreeLayout {
    fn check(&self) -> Result<()> {
        ensure(
            (1..=PROCESSES_MAX).contains(&self.processes.len()),
            "too many or no processes",
        )?;
        ensure(
            self.files.len() <= MAPPINGS_MAX && self.shared_memory.len() <= MAPPINGS_MAX,
            "too many files",
        )?;
        ensure(self.boot_id.len() <= 64, "boot ID too long")?;
        ensure(self.vdso.len() <= 16 * PAGE as usize, "vDSO too large")?;
        for file in &self.files {
            check_path(&file.path)?;
            ensure(
                file.build_id.len() <= 64 && matches!(file.digest.len(), 0 | 32),
                "invalid build ID or digest of a file",
            )?;
        }
        for object in &self.shared_memory {
            ensure(object.size <= ADDRESS_END, "shared memory too large")?;
            match &object.kind {
                SharedMemoryKind::Anonymous => {}
                SharedMemoryKind::Memfd(name) => {
                    ensure(name.len() < 250 && !name.contains(&0), "invalid memfd name")?
                }
                SharedMemoryKind::File(name) => check_path(name)?,
                SharedMemoryKind::Posix { path, access: _ } => {
                    let name = path
                        .strip_prefix(POSIX_MEMORY_DIRECTORY)
                        .unwrap_or_default();
                    let is_plain = !name.contains(&b'/') && !name.contains(&0) && name != b"..";
                    ensure(
                        (1..=255).contains(&name.len()) && is_plain,
                        "invalid name of shared memory",
                    )?;
                }
                SharedMemoryKind::Deleted { form, access: _ } => match form {
                    ContentForm::Deleted { path: name } => check_path(name.as_bytes())?,
                    ContentForm::Temporary { directory } => check_path(directory.as_bytes())?,
                    ContentForm::Memory { .. } => {
                        ensure(false, "shared memory backed by a memory file")?
                    }
                },
                SharedMemoryKind::SystemV(segment) => ensure(
                    segment.id >= 0 && segment.mode & !0o777 == 0 && segment.size == object.size,
                    "invalid System V memory",
                )?,
            }
        }
        let mut ids = HashSet::new();
        for (at, process) in self.processes.iter().enumerate() {
            let parent_before = process.parent.is_some_and(|parent| (parent as usize) < at);
            ensure(
                if at == 0 {
                    process.parent.is_none()
                } else {
                    parent_before
                },
                "invalid parent of a process",
            )?;
            ensure(
                process
                    .shares_table_with
                    .is_none_or(|other| (other as usize) < at),
                "invalid reference to a descriptor table",
            )?;
            self.check_process(process)?;
            let threads = process.threads.iter().skip(1);
            ensure(
                ids.insert(process.pid) && threads.into_iter().all(|tid| ids.insert(*tid)),
                "duplicate PID or thread ID",
            )?;
        }
        Ok(())
    }
}

impl TreeLayout {
    fn check_process(&self, process: &ProcessLayout) -> Result<()> {
        let is_valid_id = |id: i32| (2..=PID_MAX).contains(&id);
        ensure(is_valid_id(process.pid), "invalid PID")?;
        ensure(
            (1..=PID_MAX).contains(&process.group) && (1..=PID_MAX).contains(&process.session),
            "invalid process group or session",
        )?;
        ensure(
            (0..=64).contains(&process.exit_signal),
            "invalid exit signal",
        )?;
        if process.exit_status.is_some() {
            return ensure(
                process.threads.is_empty() && process.mappings.is_empty(),
                "a zombie with threads or memory",
            );
        }
        ensure(
            (1..=THREADS_MAX).contains(&process.threads.len()),
            "too many or no threads",
        )?;
        ensure(
            process.threads[0] == process.pid
                && process.threads.iter().all(|tid| is_valid_id(*tid)),
            "invalid thread ID",
        )?;
        ensure(
            (process.executable as usize) < self.files.len(),
            "invalid reference to an executable",
        )?;
        ensure(process.mappings.len() <= MAPPINGS_MAX, "too many mappings")?;
        ensure(process.credentials.groups.len() <= 65536, "too many groups")?;
        if !process.directory.is_empty() {
            check_path(&process.directory)?;
        }
        let mut end = 0;
        for mapping in &process.mappings {
            ensure(
                mapping.start >= end && mapping.start < mapping.end,
                "mappings overlap or are out of order",
            )?;
            ensure(
                mapping.end <= ADDRESS_END && (mapping.start | mapping.end) % PAGE == 0,
                "invalid addresses of a mapping",
            )?;
            ensure(
                mapping.protection & !7 == 0,
                "invalid protection of a mapping",
            )?;
            self.check_backing(mapping)?;
            end = mapping.end;
        }
        check_guards(process)
    }

    fn check_backing(&self, mapping: &MemoryMapping) -> Result<()> {
        let is_valid_offset = |offset: u64| {
            let length = mapping.end - mapping.start;
            offset.is_multiple_of(PAGE)
                && offset.checked_add(length).is_some_and(|end| end < 1 << 62)
        };
        match &mapping.backing {
            MappingBacking::Anonymous(name) => ensure(
                name.len() <= 80 && !name.contains(&0),
                "invalid name of a mapping",
            ),
            MappingBacking::File { file, offset, .. } => ensure(
                (*file as usize) < self.files.len() && is_valid_offset(*offset),
                "invalid file or offset of a mapping",
            ),
            MappingBacking::Shared { object, offset } => ensure(
                (*object as usize) < self.shared_memory.len() && is_valid_offset(*offset),
                "invalid shared memory or offset of a mapping",
            ),
            MappingBacking::Kernel(name) => ensure(name.len() <= 32, "invalid name of a mapping"),
        }
    }
}

/// Returns true if the acceptor can create so many guard pages.
pub(crate) fn are_guards_within_limits(guards: &[(u64, u64)]) -> bool {
    let bytes: u64 = guards.iter().map(|(start, end)| end - start).sum();
    guards.len() <= MAPPINGS_MAX && bytes <= GUARD_BYTES_MAX
}

/// Checks that guard pages are in order, and lie in mappings that are not the kernel's.
fn check_guards(process: &ProcessLayout) -> Result<()> {
    let mut from = 0;
    for (start, end) in &process.guards {
        ensure(
            *start >= from && start < end && (start | end) % PAGE == 0,
            "invalid addresses of guard pages",
        )?;
        from = *end;
    }
    ensure(
        are_guards_within_limits(&process.guards),
        "too many guard pages",
    )?;
    let mapped = process.mappings.iter();
    let own: AddressRanges = mapped
        .filter(|mapping| !matches!(mapping.backing, MappingBacking::Kernel(_)))
        .map(|mapping| (mapping.start, mapping.end))
        .collect();
    let guards: AddressRanges = process.guards.iter().copied().collect();
    ensure(
        guards.difference(&own).is_empty(),
        "invalid addresses of guard pages",
    )
}

/// Checks the addresses of pages, and that the size of the content matches.
pub(super) fn check_pages(runs: &[PageRun], content: usize) -> Result<()> {
    let mut bytes = 0u64;
    for run in runs {
        ensure(
            (run.start | run.length) % PAGE == 0 && run.length > 0,
            "invalid addresses of pages",
        )?;
        ensure(
            run.start
                .checked_add(run.length)
                .is_some_and(|end| end <= ADDRESS_END),
            "invalid addresses of pages",
        )?;
        if run.content == PageContent::Bytes {
            bytes = bytes.saturating_add(run.length);
        }
    }
    ensure(bytes == content as u64, "page content has the wrong length")
}

impl Validate for FileRights {
    fn check(&self) -> Result<()> {
        // Rights come from the daemon itself, not from a peer.
        Ok(())
    }
}

impl Validate for ProcessTreeState {
    fn check(&self) -> Result<()> {
        ensure(
            self.processes.len() <= PROCESSES_MAX,
            "too many or no processes",
        )?;
        self.processes.iter().flatten().try_for_each(check_process)
    }
}

fn check_process(process: &ProcessState) -> Result<()> {
    ensure(
        (1..=THREADS_MAX).contains(&process.threads.len()),
        "too many or no threads",
    )?;
    ensure(
        process.signal_actions.len() == 64,
        "wrong number of signal actions",
    )?;
    ensure(process.limits.len() <= 32, "too many resource limits")?;
    ensure(process.posix_timers.len() <= 1 << 16, "too many timers")?;
    ensure(
        process.memory.auxiliary.len() <= 4096,
        "auxiliary vector too large",
    )?;
    ensure(
        process.pending.iter().all(|info| info.0.len() == 128),
        "wrong size of a pending signal",
    )?;
    ensure(
        process
            .group_stop
            .is_none_or(|signal| STOP_SIGNALS.contains(&signal)),
        "invalid stop signal",
    )?;
    check_path(&process.directory)?;
    process.threads.iter().try_for_each(check_thread)
}

fn check_thread(thread: &ThreadState) -> Result<()> {
    ensure(
        thread.extended_registers.len() <= 16384,
        "register state too large",
    )?;
    ensure(
        thread.pending.iter().all(|info| info.0.len() == 128),
        "wrong size of a pending signal",
    )?;
    ensure(
        thread.name.len() <= 16 && !thread.name.contains(&0),
        "invalid thread name",
    )?;
    ensure(thread.credentials.groups.len() <= 65536, "too many groups")?;
    ensure(
        thread.scheduling.affinity.iter().all(|cpu| *cpu < 8192),
        "invalid CPU number",
    )?;
    let filter =
        |code: &serde_bytes::ByteBuf| code.len().is_multiple_of(8) && code.len() <= 4096 * 8;
    ensure(
        thread.seccomp_filters.len() <= 1024 && thread.seccomp_filters.iter().all(filter),
        "invalid seccomp filter",
    )
}

fn check_path(path: &[u8]) -> Result<()> {
    ensure(
        path.starts_with(b"/") && path.len() < PATH_MAX && !path.contains(&0),
        "invalid path",
    )
}

#[cfg(test)]
mod tests {
    use super::super::{BorrowedPages, DescriptorUpdate, MissingPages, decode, encode};
    use super::*;
    use proptest::prelude::*;

    fn small_tree() -> TreeLayout {
        let mapping = MemoryMapping {
            start: 0x1000,
            end: 0x3000,
            protection: 3,
            advice: 0,
            backing: MappingBacking::Anonymous(Vec::new()),
        };
        let process = ProcessLayout {
            pid: 100,
            group: 100,
            session: 100,
            threads: vec![100, 101],
            mappings: vec![mapping],
            guards: vec![(0x1000, 0x2000)],
            ..ProcessLayout::default()
        };
        let file = super::super::BackingFile {
            path: b"/bin/true".to_vec(),
            ..Default::default()
        };
        TreeLayout {
            processes: vec![process],
            files: vec![file],
            ..TreeLayout::default()
        }
    }

    #[test]
    fn tree_survives_encoding() {
        let bytes = encode(&small_tree()).expect("encodes");
        assert_eq!(decode::<TreeLayout>(&bytes).expect("decodes"), small_tree());
        let mut longer = bytes.clone();
        longer.push(0);
        assert!(decode::<TreeLayout>(&longer).is_err());
    }

    #[test]
    fn invalid_trees_are_refused() {
        let changes: [fn(&mut TreeLayout); 10] = [
            |tree| tree.processes.clear(),
            |tree| tree.processes[0].parent = Some(0),
            |tree| tree.processes[0].threads = vec![100, 100],
            |tree| tree.processes[0].mappings[0].end = 0x3001,
            |tree| tree.processes[0].mappings[0].end = ADDRESS_END + PAGE,
            |tree| tree.files[0].path = b"bin".to_vec(),
            |tree| tree.processes[0].guards = vec![(0x2000, 0x4000)],
            |tree| tree.processes[0].guards = vec![(0x1000, 0x2800)],
            |tree| tree.processes[0].guards = vec![(0x2000, 0x3000), (0x1000, 0x2000)],
            |tree| {
                let process = &mut tree.processes[0];
                process.mappings[0].end = ADDRESS_END;
                process.guards = vec![(0x1000, ADDRESS_END)];
            },
        ];
        for change in changes {
            let mut tree = small_tree();
            change(&mut tree);
            assert!(decode::<TreeLayout>(&encode(&tree).expect("encodes")).is_err());
        }
    }

    proptest! {
        #[test]
        fn random_bytes_do_not_panic(bytes in proptest::collection::vec(any::<u8>(), 0..600)) {
            let _ = decode::<TreeLayout>(&bytes);
            let _ = BorrowedPages::decode(&bytes);
            let _ = decode::<ProcessTreeState>(&bytes);
            let _ = decode::<DescriptorUpdate>(&bytes);
            let _ = decode::<MissingPages>(&bytes);
        }

        #[test]
        fn changed_state_does_not_panic(
            changes in proptest::collection::vec((0usize..100_000, any::<u8>()), 1..6),
            cut_length in 0usize..100_000,
        ) {
            let thread = ThreadState { extended_registers: vec![0; 64], ..ThreadState::default() };
            let process = ProcessState {
                threads: vec![thread; 2],
                signal_actions: vec![Default::default(); 64],
                directory: b"/".to_vec(),
                ..ProcessState::default()
            };
            let frozen = ProcessTreeState { processes: vec![Some(process), None] };
            let bytes = encode(&frozen).expect("encodes");
            prop_assert_eq!(decode::<ProcessTreeState>(&bytes).expect("decodes"), frozen);
            let mut other = bytes.clone();
            for (at, to) in changes {
                let place = at % other.len();
                other[place] = to;
            }
            other.truncate(other.len() - cut_length % other.len() / 8);
            if let Ok(frozen) = decode::<ProcessTreeState>(&other) {
                prop_assert!(frozen.check().is_ok());
            }
            prop_assert!(decode::<ProcessTreeState>(&bytes[..cut_length % bytes.len()]).is_err());
        }

        #[test]
        fn changed_byte_does_not_panic(at in 0usize..1000, to in any::<u8>()) {
            let mut bytes = encode(&small_tree()).expect("encodes");
            let place = at % bytes.len();
            bytes[place] = to;
            let _ = decode::<TreeLayout>(&bytes);
        }
    }
}
