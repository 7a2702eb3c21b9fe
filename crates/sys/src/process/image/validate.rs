//! Checks of an image for constraints that the types cannot express.

use super::{
    ADDRESS_END, Backing, Checked, Content, Frozen, FrozenProcess, FrozenThread, Mapping, PAGE,
    POSIX_MEMORY, Process, Run, SharedKind, Tree,
};
use crate::process::error::{Error, Result};
use crate::process::files::image::ContentForm;
use crate::process::ranges::Ranges;
use crate::process::rights::Rights;
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

fn ensure(holds: bool, otherwise: &'static str) -> Result<()> {
    if holds {
        Ok(())
    } else {
        Err(Error::Image(otherwise))
    }
}

impl Checked for Tree {
    fn check(&self) -> Result<()> {
        ensure(
            (1..=PROCESSES_MAX).contains(&self.processes.len()),
            "number of processes",
        )?;
        ensure(
            self.files.len() <= MAPPINGS_MAX && self.shared.len() <= MAPPINGS_MAX,
            "number of files",
        )?;
        ensure(self.boot_id.len() <= 64, "a boot id")?;
        ensure(self.vdso.len() <= 16 * PAGE as usize, "size of the vDSO")?;
        for file in &self.files {
            path(&file.path)?;
            ensure(
                file.build_id.len() <= 64 && matches!(file.digest.len(), 0 | 32),
                "a file's digest",
            )?;
        }
        for object in &self.shared {
            ensure(object.size <= ADDRESS_END, "size of shared memory")?;
            match &object.kind {
                SharedKind::Anonymous => {}
                SharedKind::Memfd(name) => {
                    ensure(name.len() < 250 && !name.contains(&0), "a memfd's name")?
                }
                SharedKind::File(name) => path(name)?,
                SharedKind::Posix { path, access: _ } => {
                    let name = path.strip_prefix(POSIX_MEMORY).unwrap_or_default();
                    let plain = !name.contains(&b'/') && !name.contains(&0) && name != b"..";
                    ensure(
                        (1..=255).contains(&name.len()) && plain,
                        "a name of shared memory",
                    )?;
                }
                SharedKind::Deleted { form, access: _ } => match form {
                    ContentForm::Deleted { path: name } => path(name.as_bytes())?,
                    ContentForm::Temporary { directory } => path(directory.as_bytes())?,
                    ContentForm::Memory { .. } => ensure(false, "a file without a name")?,
                },
                SharedKind::SystemV(segment) => ensure(
                    segment.id >= 0 && segment.mode & !0o777 == 0 && segment.size == object.size,
                    "System V memory",
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
                "a parent",
            )?;
            ensure(
                process.table_of.is_none_or(|other| (other as usize) < at),
                "a descriptor table",
            )?;
            self.check_process(process)?;
            let threads = process.threads.iter().skip(1);
            ensure(
                ids.insert(process.pid) && threads.into_iter().all(|tid| ids.insert(*tid)),
                "an ID twice",
            )?;
        }
        Ok(())
    }
}

impl Tree {
    fn check_process(&self, process: &Process) -> Result<()> {
        let id = |id: i32| (2..=PID_MAX).contains(&id);
        ensure(id(process.pid), "a PID")?;
        ensure(
            (1..=PID_MAX).contains(&process.group) && (1..=PID_MAX).contains(&process.session),
            "a group",
        )?;
        ensure((0..=64).contains(&process.exit_signal), "an exit signal")?;
        if process.exit_status.is_some() {
            return ensure(
                process.threads.is_empty() && process.mappings.is_empty(),
                "a zombie with memory",
            );
        }
        ensure(
            (1..=THREADS_MAX).contains(&process.threads.len()),
            "number of threads",
        )?;
        ensure(
            process.threads[0] == process.pid && process.threads.iter().all(|tid| id(*tid)),
            "a thread's ID",
        )?;
        ensure(
            (process.executable as usize) < self.files.len(),
            "an executable",
        )?;
        ensure(process.mappings.len() <= MAPPINGS_MAX, "number of mappings")?;
        ensure(
            process.credentials.groups.len() <= 65536,
            "number of groups",
        )?;
        if !process.directory.is_empty() {
            path(&process.directory)?;
        }
        let mut end = 0;
        for mapping in &process.mappings {
            ensure(
                mapping.start >= end && mapping.start < mapping.end,
                "order of mappings",
            )?;
            ensure(
                mapping.end <= ADDRESS_END && (mapping.start | mapping.end) % PAGE == 0,
                "a mapping's place",
            )?;
            ensure(mapping.protection & !7 == 0, "a mapping's protection")?;
            self.check_backing(mapping)?;
            end = mapping.end;
        }
        check_guards(process)
    }

    fn check_backing(&self, mapping: &Mapping) -> Result<()> {
        let within = |offset: u64| {
            let length = mapping.end - mapping.start;
            offset.is_multiple_of(PAGE)
                && offset.checked_add(length).is_some_and(|end| end < 1 << 62)
        };
        match &mapping.backing {
            Backing::Anonymous(name) => {
                ensure(name.len() <= 80 && !name.contains(&0), "name of a mapping")
            }
            Backing::File { file, offset, .. } => ensure(
                (*file as usize) < self.files.len() && within(*offset),
                "a mapping's file",
            ),
            Backing::Shared { object, offset } => ensure(
                (*object as usize) < self.shared.len() && within(*offset),
                "a mapping's memory",
            ),
            Backing::Kernel(name) => ensure(name.len() <= 32, "name of a mapping"),
        }
    }
}

/// Returns true if the acceptor can create so many guard pages.
pub(crate) fn guards_fit(guards: &[(u64, u64)]) -> bool {
    let bytes: u64 = guards.iter().map(|(start, end)| end - start).sum();
    guards.len() <= MAPPINGS_MAX && bytes <= GUARD_BYTES_MAX
}

/// Checks that guard pages are in order, and lie in mappings that are not the kernel's.
fn check_guards(process: &Process) -> Result<()> {
    let mut from = 0;
    for (start, end) in &process.guards {
        ensure(
            *start >= from && start < end && (start | end) % PAGE == 0,
            "a guard page's place",
        )?;
        from = *end;
    }
    ensure(guards_fit(&process.guards), "number of guard pages")?;
    let own = process.mappings.iter();
    let own: Ranges = own
        .filter(|mapping| !matches!(mapping.backing, Backing::Kernel(_)))
        .map(|mapping| (mapping.start, mapping.end))
        .collect();
    let guards: Ranges = process.guards.iter().copied().collect();
    ensure(guards.minus(&own).is_empty(), "a guard page's place")
}

/// Checks the addresses of pages, and that the size of the content matches.
pub(super) fn check_pages(runs: &[Run], content: usize) -> Result<()> {
    let mut bytes = 0u64;
    for run in runs {
        ensure(
            (run.start | run.length) % PAGE == 0 && run.length > 0,
            "a page's place",
        )?;
        ensure(
            run.start
                .checked_add(run.length)
                .is_some_and(|end| end <= ADDRESS_END),
            "a page's place",
        )?;
        if run.content == Content::Bytes {
            bytes = bytes.saturating_add(run.length);
        }
    }
    ensure(bytes == content as u64, "bytes of pages")
}

impl Checked for Rights {
    fn check(&self) -> Result<()> {
        // Rights come from the daemon itself, not from a peer.
        Ok(())
    }
}

impl Checked for Frozen {
    fn check(&self) -> Result<()> {
        ensure(self.processes.len() <= PROCESSES_MAX, "number of processes")?;
        self.processes.iter().flatten().try_for_each(check_process)
    }
}

fn check_process(process: &FrozenProcess) -> Result<()> {
    ensure(
        (1..=THREADS_MAX).contains(&process.threads.len()),
        "number of threads",
    )?;
    ensure(process.actions.len() == 64, "number of signal actions")?;
    ensure(process.limits.len() <= 32, "number of limits")?;
    ensure(process.posix_timers.len() <= 1 << 16, "number of timers")?;
    ensure(
        process.memory.auxiliary.len() <= 4096,
        "size of the auxiliary vector",
    )?;
    ensure(
        process.pending.iter().all(|info| info.0.len() == 128),
        "a signal's size",
    )?;
    ensure(
        process
            .stopped
            .is_none_or(|signal| STOP_SIGNALS.contains(&signal)),
        "a stop signal",
    )?;
    path(&process.directory)?;
    process.threads.iter().try_for_each(check_thread)
}

fn check_thread(thread: &FrozenThread) -> Result<()> {
    ensure(thread.extended.len() <= 16384, "size of registers")?;
    ensure(
        thread.pending.iter().all(|info| info.0.len() == 128),
        "a signal's size",
    )?;
    ensure(
        thread.name.len() <= 16 && !thread.name.contains(&0),
        "a name",
    )?;
    ensure(thread.credentials.groups.len() <= 65536, "number of groups")?;
    ensure(
        thread.scheduling.affinity.iter().all(|cpu| *cpu < 8192),
        "a processor",
    )?;
    let filter =
        |code: &serde_bytes::ByteBuf| code.len().is_multiple_of(8) && code.len() <= 4096 * 8;
    ensure(
        thread.filters.len() <= 1024 && thread.filters.iter().all(filter),
        "a filter",
    )
}

fn path(path: &[u8]) -> Result<()> {
    ensure(
        path.starts_with(b"/") && path.len() < PATH_MAX && !path.contains(&0),
        "a path",
    )
}

#[cfg(test)]
mod tests {
    use super::super::{Descriptors, Missing, PagesIn, decode, encode};
    use super::*;
    use proptest::prelude::*;

    fn small() -> Tree {
        let mapping = Mapping {
            start: 0x1000,
            end: 0x3000,
            protection: 3,
            advice: 0,
            backing: Backing::Anonymous(Vec::new()),
        };
        let process = Process {
            pid: 100,
            group: 100,
            session: 100,
            threads: vec![100, 101],
            mappings: vec![mapping],
            guards: vec![(0x1000, 0x2000)],
            ..Process::default()
        };
        let file = super::super::BackingFile {
            path: b"/bin/true".to_vec(),
            ..Default::default()
        };
        Tree {
            processes: vec![process],
            files: vec![file],
            ..Tree::default()
        }
    }

    #[test]
    fn a_tree_goes_round() {
        let bytes = encode(&small()).expect("encodes");
        assert_eq!(decode::<Tree>(&bytes).expect("decodes"), small());
        let mut longer = bytes.clone();
        longer.push(0);
        assert!(decode::<Tree>(&longer).is_err());
    }

    #[test]
    fn wrong_trees_are_refused() {
        let spoil: [fn(&mut Tree); 10] = [
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
        for change in spoil {
            let mut tree = small();
            change(&mut tree);
            assert!(decode::<Tree>(&encode(&tree).expect("encodes")).is_err());
        }
    }

    proptest! {
        #[test]
        fn any_bytes_are_read_or_refused(bytes in proptest::collection::vec(any::<u8>(), 0..600)) {
            let _ = decode::<Tree>(&bytes);
            let _ = PagesIn::read(&bytes);
            let _ = decode::<Frozen>(&bytes);
            let _ = decode::<Descriptors>(&bytes);
            let _ = decode::<Missing>(&bytes);
        }

        #[test]
        fn changed_states_are_read_or_refused(
            changes in proptest::collection::vec((0usize..100_000, any::<u8>()), 1..6),
            cut in 0usize..100_000,
        ) {
            let thread = FrozenThread { extended: vec![0; 64], ..FrozenThread::default() };
            let process = FrozenProcess {
                threads: vec![thread; 2],
                actions: vec![Default::default(); 64],
                directory: b"/".to_vec(),
                ..FrozenProcess::default()
            };
            let frozen = Frozen { processes: vec![Some(process), None] };
            let bytes = encode(&frozen).expect("encodes");
            prop_assert_eq!(decode::<Frozen>(&bytes).expect("decodes"), frozen);
            let mut other = bytes.clone();
            for (at, to) in changes {
                let place = at % other.len();
                other[place] = to;
            }
            other.truncate(other.len() - cut % other.len() / 8);
            if let Ok(frozen) = decode::<Frozen>(&other) {
                prop_assert!(frozen.check().is_ok());
            }
            prop_assert!(decode::<Frozen>(&bytes[..cut % bytes.len()]).is_err());
        }

        #[test]
        fn a_changed_byte_is_read_or_refused(at in 0usize..1000, to in any::<u8>()) {
            let mut bytes = encode(&small()).expect("encodes");
            let place = at % bytes.len();
            bytes[place] = to;
            let _ = decode::<Tree>(&bytes);
        }
    }
}
