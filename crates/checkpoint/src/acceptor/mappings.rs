//! Mappings of a stub process, made like the original's.

use super::mapped_object_store::MappedObjectStore;
use super::stub_process::{CallScript, StubProcess};
use crate::address_ranges::AddressRanges;
use crate::error::Result;
use crate::image::{GUARD_INSTALL, MappingBacking, MemoryMapping, ProcessLayout};
use crate::procfs::VmFlags;
use std::os::fd::{AsFd, BorrowedFd};

/// `PR_SET_VMA` with `PR_SET_VMA_ANON_NAME`.
const PR_SET_VMA_ANON_NAME: [u64; 2] = [0x5356_4d41, 0];

/// `MLOCK_ONFAULT`.
const MLOCK_ONFAULT: u64 = 1;
/// `MADV_GUARD_REMOVE`.
const MADV_GUARD_REMOVE: i32 = 103;
/// `MAP_DROPPABLE`, a mapping type of its own besides private and shared.
const MAP_DROPPABLE: i32 = 8;

/// Advice bit, the `madvise` value that sets it, and the value that clears it, if there is one.
const ADVICE_VALUES: [(u32, i32, Option<i32>); 8] = [
    (
        VmFlags::DONT_FORK,
        libc::MADV_DONTFORK,
        Some(libc::MADV_DOFORK),
    ),
    (
        VmFlags::DONT_DUMP,
        libc::MADV_DONTDUMP,
        Some(libc::MADV_DODUMP),
    ),
    (
        VmFlags::WIPE_ON_FORK,
        libc::MADV_WIPEONFORK,
        Some(libc::MADV_KEEPONFORK),
    ),
    (VmFlags::HUGE, libc::MADV_HUGEPAGE, None),
    (VmFlags::NO_HUGE, libc::MADV_NOHUGEPAGE, None),
    (
        VmFlags::MERGEABLE,
        libc::MADV_MERGEABLE,
        Some(libc::MADV_UNMERGEABLE),
    ),
    (
        VmFlags::SEQUENTIAL,
        libc::MADV_SEQUENTIAL,
        Some(libc::MADV_NORMAL),
    ),
    (VmFlags::RANDOM, libc::MADV_RANDOM, Some(libc::MADV_NORMAL)),
];

/// Adjusts the mappings of a stub process to `process`. Mappings that both have stay, with their content.
pub(super) fn reconcile_mappings(
    stub_process: &mut StubProcess,
    process: &ProcessLayout,
    objects: &MappedObjectStore,
) -> Result<()> {
    if stub_process.mappings == process.mappings {
        return Ok(());
    }
    let stable = MemoryMapping::stable_ranges(&stub_process.mappings, &process.mappings);
    let mut adjuster = MappingAdjuster {
        stub_process,
        script: stub_process.script(),
    };
    for (start, end) in mapping_ranges(&stub_process.mappings)
        .difference(&stable)
        .iter()
    {
        adjuster
            .script
            .add_call("munmap", libc::SYS_munmap, &[start, end - start]);
        adjuster.flush()?;
    }
    for mapping in &process.mappings {
        let mapping_range: AddressRanges = [(mapping.start, mapping.end)].into_iter().collect();
        for piece in mapping_range.difference(&stable).iter() {
            adjuster.map_piece(mapping, piece, objects)?;
        }
        for piece in mapping_range.intersection(&stable).iter() {
            adjuster.change_protection(mapping, piece)?;
        }
    }
    adjuster.run_remaining_calls()?;
    stub_process.mappings.clone_from(&process.mappings);
    stub_process.guards = stub_process.guards.intersection(&stable);
    Ok(())
}

/// Adjusts the guard pages of a stub process to `process`, after its mappings.
pub(super) fn reconcile_guards(
    stub_process: &mut StubProcess,
    process: &ProcessLayout,
) -> Result<()> {
    let wanted: AddressRanges = process.guards.iter().copied().collect();
    if stub_process.guards == wanted {
        return Ok(());
    }
    let mut script = stub_process.script();
    let changes = [
        (
            "MADV_GUARD_REMOVE",
            MADV_GUARD_REMOVE,
            stub_process.guards.difference(&wanted),
        ),
        (
            "MADV_GUARD_INSTALL (requires Linux 6.13; for file mappings 6.15)",
            GUARD_INSTALL,
            wanted.difference(&stub_process.guards),
        ),
    ];
    for (name, advice, ranges) in changes {
        for (start, end) in ranges.iter() {
            script.add_call(
                name,
                libc::SYS_madvise,
                &[start, end - start, advice as u64],
            );
            script.flush(stub_process)?;
        }
    }
    stub_process.run_script(script)?;
    stub_process.guards = wanted;
    Ok(())
}

/// Unmaps shared memory objects, given by index.
pub(super) fn unmap_shared(stub_process: &mut StubProcess, removed: &[u32]) -> Result<()> {
    let is_removed = |mapping: &MemoryMapping| match mapping.backing {
        MappingBacking::Shared { object, .. } => removed.contains(&object),
        _ => false,
    };
    let mut script = stub_process.script();
    for mapping in stub_process
        .mappings
        .iter()
        .filter(|mapping| is_removed(mapping))
    {
        let arguments = [mapping.start, mapping.end - mapping.start];
        script.add_call("munmap", libc::SYS_munmap, &arguments);
        script.flush(stub_process)?;
    }
    stub_process.run_script(script)?;
    stub_process.mappings.retain(|mapping| !is_removed(mapping));
    Ok(())
}

/// Locks the memory that the original has locked. Called last, when all memory is present.
pub(super) fn lock_memory(stub_process: &StubProcess) -> Result<()> {
    let mut script = stub_process.script();
    for mapping in stub_process
        .mappings
        .iter()
        .filter(|mapping| VmFlags(mapping.advice).has_any(VmFlags::LOCKED))
    {
        let (start, length) = (mapping.start, mapping.end - mapping.start);
        let on_fault = VmFlags(mapping.advice).has_any(VmFlags::LOCKED_ON_FAULT);
        let flags = if on_fault { MLOCK_ONFAULT } else { 0 };
        let arguments = [start, length, flags];
        let mapping_range: AddressRanges = [(mapping.start, mapping.end)].into_iter().collect();
        let guarded = !stub_process.guards.intersection(&mapping_range).is_empty();
        // For inaccessible memory the call locks the range, but fails as it cannot bring the pages in.
        if mapping.protection == libc::PROT_NONE || guarded {
            script.add_optional_call(libc::SYS_mlock2, &arguments);
        } else {
            script.add_call("mlock", libc::SYS_mlock2, &arguments);
        }
    }
    stub_process.run_script(script).map(drop)
}

fn mapping_ranges(mappings: &[MemoryMapping]) -> AddressRanges {
    mappings
        .iter()
        .map(|mapping| (mapping.start, mapping.end))
        .collect()
}

struct MappingAdjuster<'a> {
    stub_process: &'a StubProcess,
    script: CallScript,
}

impl MappingAdjuster<'_> {
    fn map_piece(
        &mut self,
        mapping: &MemoryMapping,
        piece: (u64, u64),
        objects: &MappedObjectStore,
    ) -> Result<()> {
        let offset_of_piece = |offset: u64| offset + (piece.0 - mapping.start);
        match &mapping.backing {
            MappingBacking::Anonymous(name) => {
                let droppable = VmFlags(mapping.advice).has_any(VmFlags::DROPPABLE);
                let kind = if droppable {
                    MAP_DROPPABLE
                } else {
                    libc::MAP_PRIVATE
                };
                self.map_at(mapping, piece, kind | libc::MAP_ANONYMOUS, None)?;
                self.name_piece(name, piece)?;
            }
            MappingBacking::File {
                file,
                offset,
                shared,
            } => {
                let flags = if *shared {
                    libc::MAP_SHARED
                } else {
                    libc::MAP_PRIVATE
                };
                let file = (objects.mapped_file(*file), offset_of_piece(*offset));
                self.map_at(mapping, piece, flags, Some(file))?;
            }
            MappingBacking::Shared { object, offset } => {
                if let Some(id) = objects.segment_id(*object) {
                    self.attach_segment(mapping, piece, (id, offset_of_piece(*offset)));
                    self.advise(mapping.advice, 0, piece);
                    return self.flush();
                }
                let writable = VmFlags(mapping.advice).has_any(VmFlags::MAY_WRITE);
                let mode = if writable {
                    libc::O_RDWR
                } else {
                    libc::O_RDONLY
                };
                let file = objects.open_shared(*object, mode)?;
                let file = (file.as_fd(), offset_of_piece(*offset));
                self.map_at(mapping, piece, libc::MAP_SHARED, Some(file))?;
            }
            // Moved into place when the process's copied memory was unmapped.
            MappingBacking::Kernel(_) => return Ok(()),
        }
        if !VmFlags(mapping.advice).has_any(VmFlags::DROPPABLE) {
            self.advise(mapping.advice, 0, piece);
        }
        self.flush()
    }

    /// Attaches a System V segment at its first piece. The attachment includes the other pieces.
    fn attach_segment(
        &mut self,
        mapping: &MemoryMapping,
        (start, end): (u64, u64),
        (id, offset): (i32, u64),
    ) {
        let executable = mapping.protection & libc::PROT_EXEC;
        let writable = VmFlags(mapping.advice).has_any(VmFlags::MAY_WRITE);
        if offset == 0 {
            let flags = if writable { 0 } else { libc::SHM_RDONLY }
                | if executable != 0 { libc::SHM_EXEC } else { 0 };
            let arguments = [id as u64, start, flags as u64];
            self.script.add_call("shmat", libc::SYS_shmat, &arguments);
        }
        let writes = if writable { libc::PROT_WRITE } else { 0 };
        if offset != 0 || mapping.protection != libc::PROT_READ | writes | executable {
            let arguments = [start, end - start, mapping.protection as u64];
            self.script
                .add_call("mprotect", libc::SYS_mprotect, &arguments);
        }
    }

    /// Maps a piece of anonymous memory, or of a file from an offset on.
    fn map_at(
        &mut self,
        mapping: &MemoryMapping,
        piece: (u64, u64),
        flags: i32,
        file: Option<(BorrowedFd<'_>, u64)>,
    ) -> Result<()> {
        let advice = VmFlags(mapping.advice);
        let flag_if = |bit: u32, flag: i32| if advice.has_any(bit) { flag } else { 0 };
        let flags = flags
            | libc::MAP_FIXED_NOREPLACE
            | flag_if(VmFlags::GROWS_DOWN, libc::MAP_GROWSDOWN)
            | flag_if(VmFlags::NO_RESERVE, libc::MAP_NORESERVE);
        let offset = file.as_ref().map_or(0, |(_, offset)| *offset);
        let (start, length) = (piece.0, piece.1 - piece.0);
        let number = match file {
            Some((file, _)) => Some(self.stub_process.pass_fd(&mut self.script, file)?),
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
        self.script.add_call("mmap", libc::SYS_mmap, &arguments);
        if let Some(number) = number {
            self.script.add_call("close", libc::SYS_close, &[number]);
        }
        Ok(())
    }

    fn name_piece(&mut self, name: &[u8], (start, end): (u64, u64)) -> Result<()> {
        if !name.is_empty() {
            let name = self.script.add_text(name)?;
            let arguments = [
                PR_SET_VMA_ANON_NAME[0],
                PR_SET_VMA_ANON_NAME[1],
                start,
                end - start,
                name,
            ];
            self.script.add_optional_call(libc::SYS_prctl, &arguments);
        }
        Ok(())
    }

    /// Changes protection and advice of existing mappings.
    fn change_protection(&mut self, mapping: &MemoryMapping, piece: (u64, u64)) -> Result<()> {
        let overlapping = |old: &&MemoryMapping| old.start < piece.1 && piece.0 < old.end;
        if matches!(mapping.backing, MappingBacking::Kernel(_)) {
            return Ok(());
        }
        for old in self.stub_process.mappings.iter().filter(overlapping) {
            let (start, end) = (old.start.max(piece.0), old.end.min(piece.1));
            if old.protection != mapping.protection {
                let arguments = [start, end - start, mapping.protection as u64];
                self.script
                    .add_call("mprotect", libc::SYS_mprotect, &arguments);
            }
            self.advise(mapping.advice, old.advice, (start, end));
            self.flush()?;
        }
        Ok(())
    }

    fn advise(&mut self, wanted: u32, present: u32, (start, end): (u64, u64)) {
        let mut advise_range = |advice: i32| {
            self.script
                .add_optional_call(libc::SYS_madvise, &[start, end - start, advice as u64])
        };
        for (bit, _, clearing) in ADVICE_VALUES {
            if present & !wanted & bit != 0
                && let Some(clearing) = clearing
            {
                advise_range(clearing);
            }
        }
        for (bit, advice, _) in ADVICE_VALUES {
            if wanted & !present & bit != 0 {
                advise_range(advice);
            }
        }
    }

    fn flush(&mut self) -> Result<()> {
        if self.script.is_full() {
            let script = std::mem::replace(&mut self.script, self.stub_process.script());
            self.stub_process.run_script(script)?;
        }
        Ok(())
    }

    fn run_remaining_calls(self) -> Result<()> {
        self.stub_process.run_script(self.script).map(drop)
    }
}
