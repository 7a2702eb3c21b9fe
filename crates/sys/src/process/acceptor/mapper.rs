//! Mappings of an empty process, made like the original's.

use super::husk::{Husk, Script};
use super::objects::Objects;
use crate::process::error::Result;
use crate::process::image::{Backing, GUARD_INSTALL, Mapping, Process};
use crate::process::procfs::Advice;
use crate::process::ranges::Ranges;
use std::os::fd::{AsFd, BorrowedFd};

/// `PR_SET_VMA` with `PR_SET_VMA_ANON_NAME`.
const SET_NAME: [u64; 2] = [0x5356_4d41, 0];

/// `MLOCK_ONFAULT`.
const MLOCK_ONFAULT: u64 = 1;
/// `MADV_GUARD_REMOVE`.
const GUARD_REMOVE: i32 = 103;
/// `MAP_DROPPABLE`, a mapping type of its own besides private and shared.
const MAP_DROPPABLE: i32 = 8;

/// Advice bit, the `madvise` value that sets it, and the value that clears it, if there is one.
const ADVICE: [(u32, i32, Option<i32>); 8] = [
    (
        Advice::DONT_FORK,
        libc::MADV_DONTFORK,
        Some(libc::MADV_DOFORK),
    ),
    (
        Advice::DONT_DUMP,
        libc::MADV_DONTDUMP,
        Some(libc::MADV_DODUMP),
    ),
    (
        Advice::WIPE_ON_FORK,
        libc::MADV_WIPEONFORK,
        Some(libc::MADV_KEEPONFORK),
    ),
    (Advice::HUGE, libc::MADV_HUGEPAGE, None),
    (Advice::NO_HUGE, libc::MADV_NOHUGEPAGE, None),
    (
        Advice::MERGEABLE,
        libc::MADV_MERGEABLE,
        Some(libc::MADV_UNMERGEABLE),
    ),
    (
        Advice::SEQUENTIAL,
        libc::MADV_SEQUENTIAL,
        Some(libc::MADV_NORMAL),
    ),
    (Advice::RANDOM, libc::MADV_RANDOM, Some(libc::MADV_NORMAL)),
];

/// Adjusts the mappings of an empty process to `process`. Mappings that both have stay, with their content.
pub(super) fn reconcile(husk: &mut Husk, process: &Process, objects: &Objects) -> Result<()> {
    if husk.mappings == process.mappings {
        return Ok(());
    }
    let stable = Mapping::stable(&husk.mappings, &process.mappings);
    let mut work = Work {
        husk,
        script: husk.script(),
    };
    for (start, end) in ranges(&husk.mappings).minus(&stable).iter() {
        work.script
            .call("munmap", libc::SYS_munmap, &[start, end - start]);
        work.flush()?;
    }
    for mapping in &process.mappings {
        let whole: Ranges = [(mapping.start, mapping.end)].into_iter().collect();
        for piece in whole.minus(&stable).iter() {
            work.map(mapping, piece, objects)?;
        }
        for piece in whole.and(&stable).iter() {
            work.change(mapping, piece)?;
        }
    }
    work.finish()?;
    husk.mappings.clone_from(&process.mappings);
    husk.guards = husk.guards.and(&stable);
    Ok(())
}

/// Adjusts the guard pages of an empty process to `process`, after its mappings.
pub(super) fn guard(husk: &mut Husk, process: &Process) -> Result<()> {
    let wanted: Ranges = process.guards.iter().copied().collect();
    if husk.guards == wanted {
        return Ok(());
    }
    let mut script = husk.script();
    let changes = [
        (
            "MADV_GUARD_REMOVE",
            GUARD_REMOVE,
            husk.guards.minus(&wanted),
        ),
        (
            "MADV_GUARD_INSTALL (Linux 6.13; of files 6.15)",
            GUARD_INSTALL,
            wanted.minus(&husk.guards),
        ),
    ];
    for (name, advice, ranges) in changes {
        for (start, end) in ranges.iter() {
            script.call(
                name,
                libc::SYS_madvise,
                &[start, end - start, advice as u64],
            );
            script.flush(husk)?;
        }
    }
    husk.run(script)?;
    husk.guards = wanted;
    Ok(())
}

/// Unmaps shared memory objects, given by index.
pub(super) fn detach(husk: &mut Husk, gone: &[u32]) -> Result<()> {
    let is_gone = |mapping: &Mapping| match mapping.backing {
        Backing::Shared { object, .. } => gone.contains(&object),
        _ => false,
    };
    let mut script = husk.script();
    for mapping in husk.mappings.iter().filter(|mapping| is_gone(mapping)) {
        let arguments = [mapping.start, mapping.end - mapping.start];
        script.call("munmap", libc::SYS_munmap, &arguments);
        script.flush(husk)?;
    }
    husk.run(script)?;
    husk.mappings.retain(|mapping| !is_gone(mapping));
    Ok(())
}

/// Locks the memory that the original has locked. Called last, when all memory is present.
pub(super) fn lock(husk: &Husk) -> Result<()> {
    let mut script = husk.script();
    for mapping in husk
        .mappings
        .iter()
        .filter(|mapping| Advice(mapping.advice).has(Advice::LOCKED))
    {
        let (start, length) = (mapping.start, mapping.end - mapping.start);
        let on_fault = Advice(mapping.advice).has(Advice::LOCKED_ON_FAULT);
        let how = if on_fault { MLOCK_ONFAULT } else { 0 };
        let arguments = [start, length, how];
        let whole: Ranges = [(mapping.start, mapping.end)].into_iter().collect();
        let guarded = !husk.guards.and(&whole).is_empty();
        // For inaccessible memory the call locks the range, but fails as it cannot bring the pages in.
        if mapping.protection == libc::PROT_NONE || guarded {
            script.attempt(libc::SYS_mlock2, &arguments);
        } else {
            script.call("mlock", libc::SYS_mlock2, &arguments);
        }
    }
    husk.run(script).map(drop)
}

fn ranges(mappings: &[Mapping]) -> Ranges {
    mappings
        .iter()
        .map(|mapping| (mapping.start, mapping.end))
        .collect()
}

struct Work<'a> {
    husk: &'a Husk,
    script: Script,
}

impl Work<'_> {
    fn map(&mut self, mapping: &Mapping, piece: (u64, u64), objects: &Objects) -> Result<()> {
        let from = |offset: u64| offset + (piece.0 - mapping.start);
        match &mapping.backing {
            Backing::Anonymous(name) => {
                let droppable = Advice(mapping.advice).has(Advice::DROPPABLE);
                let kind = if droppable {
                    MAP_DROPPABLE
                } else {
                    libc::MAP_PRIVATE
                };
                self.ask(mapping, piece, kind | libc::MAP_ANONYMOUS, None)?;
                self.name(name, piece)?;
            }
            Backing::File {
                file,
                offset,
                shared,
            } => {
                let flags = if *shared {
                    libc::MAP_SHARED
                } else {
                    libc::MAP_PRIVATE
                };
                let file = (objects.file(*file), from(*offset));
                self.ask(mapping, piece, flags, Some(file))?;
            }
            Backing::Shared { object, offset } => {
                if let Some(id) = objects.segment(*object) {
                    self.attach(mapping, piece, (id, from(*offset)));
                    self.advise(mapping.advice, 0, piece);
                    return self.flush();
                }
                let writable = Advice(mapping.advice).has(Advice::MAY_WRITE);
                let mode = if writable {
                    libc::O_RDWR
                } else {
                    libc::O_RDONLY
                };
                let file = objects.open_shared(*object, mode)?;
                let file = (file.as_fd(), from(*offset));
                self.ask(mapping, piece, libc::MAP_SHARED, Some(file))?;
            }
            // Moved into place when the process's copied memory was unmapped.
            Backing::Kernel(_) => return Ok(()),
        }
        if !Advice(mapping.advice).has(Advice::DROPPABLE) {
            self.advise(mapping.advice, 0, piece);
        }
        self.flush()
    }

    /// Attaches a System V segment at its first piece. The attachment includes the other pieces.
    fn attach(&mut self, mapping: &Mapping, (start, end): (u64, u64), (id, offset): (i32, u64)) {
        let executable = mapping.protection & libc::PROT_EXEC;
        let writable = Advice(mapping.advice).has(Advice::MAY_WRITE);
        if offset == 0 {
            let flags = if writable { 0 } else { libc::SHM_RDONLY }
                | if executable != 0 { libc::SHM_EXEC } else { 0 };
            let arguments = [id as u64, start, flags as u64];
            self.script.call("shmat", libc::SYS_shmat, &arguments);
        }
        let writes = if writable { libc::PROT_WRITE } else { 0 };
        if offset != 0 || mapping.protection != libc::PROT_READ | writes | executable {
            let arguments = [start, end - start, mapping.protection as u64];
            self.script.call("mprotect", libc::SYS_mprotect, &arguments);
        }
    }

    /// Maps a piece of anonymous memory, or of a file from an offset on.
    fn ask(
        &mut self,
        mapping: &Mapping,
        piece: (u64, u64),
        flags: i32,
        file: Option<(BorrowedFd<'_>, u64)>,
    ) -> Result<()> {
        let advice = Advice(mapping.advice);
        let when = |bit: u32, flag: i32| if advice.has(bit) { flag } else { 0 };
        let flags = flags
            | libc::MAP_FIXED_NOREPLACE
            | when(Advice::GROWS_DOWN, libc::MAP_GROWSDOWN)
            | when(Advice::NO_RESERVE, libc::MAP_NORESERVE);
        let offset = file.as_ref().map_or(0, |(_, offset)| *offset);
        let (start, length) = (piece.0, piece.1 - piece.0);
        let number = match file {
            Some((file, _)) => Some(self.husk.receive(&mut self.script, file)?),
            None => None,
        };
        let arguments = [
            start,
            length,
            mapping.protection as u64,
            flags as u64,
            number.unwrap_or(u64::MAX),
            offset,
        ];
        self.script.call("mmap", libc::SYS_mmap, &arguments);
        if let Some(number) = number {
            self.script.call("close", libc::SYS_close, &[number]);
        }
        Ok(())
    }

    fn name(&mut self, name: &[u8], (start, end): (u64, u64)) -> Result<()> {
        if !name.is_empty() {
            let name = self.script.text(name)?;
            let arguments = [SET_NAME[0], SET_NAME[1], start, end - start, name];
            self.script.attempt(libc::SYS_prctl, &arguments);
        }
        Ok(())
    }

    /// Changes protection and advice of existing mappings.
    fn change(&mut self, mapping: &Mapping, piece: (u64, u64)) -> Result<()> {
        let overlapping = |old: &&Mapping| old.start < piece.1 && piece.0 < old.end;
        if matches!(mapping.backing, Backing::Kernel(_)) {
            return Ok(());
        }
        for old in self.husk.mappings.iter().filter(overlapping) {
            let (start, end) = (old.start.max(piece.0), old.end.min(piece.1));
            if old.protection != mapping.protection {
                let arguments = [start, end - start, mapping.protection as u64];
                self.script.call("mprotect", libc::SYS_mprotect, &arguments);
            }
            self.advise(mapping.advice, old.advice, (start, end));
            self.flush()?;
        }
        Ok(())
    }

    fn advise(&mut self, wanted: u32, present: u32, (start, end): (u64, u64)) {
        let mut say = |advice: i32| {
            self.script
                .attempt(libc::SYS_madvise, &[start, end - start, advice as u64])
        };
        for (bit, _, back) in ADVICE {
            if present & !wanted & bit != 0
                && let Some(back) = back
            {
                say(back);
            }
        }
        for (bit, advice, _) in ADVICE {
            if wanted & !present & bit != 0 {
                say(advice);
            }
        }
    }

    fn flush(&mut self) -> Result<()> {
        if self.script.is_full() {
            let script = std::mem::replace(&mut self.script, self.husk.script());
            self.husk.run(script)?;
        }
        Ok(())
    }

    fn finish(self) -> Result<()> {
        self.husk.run(self.script).map(drop)
    }
}
