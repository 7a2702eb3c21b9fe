//! The restored tree is compared with the original, and each difference is named.

use crate::migration;
use crate::program::Program;
use holdfast_checkpoint::donor::{StoppedTree, TreeTracker};
use holdfast_checkpoint::error::Error;
use holdfast_checkpoint::files::FilesImage;
use holdfast_checkpoint::image::{
    DescriptorUpdate, MemorySpace, OpenFilesUpdate, PageContent, PageRun, PagesMessage,
    ProcessTreeState, TreeLayout,
};
use std::collections::BTreeMap;
use std::io::Write;

#[test]
fn differences_are_named() {
    let program = Program::start_feature("anonymous");
    assert_eq!(difference(&program, |_| {}, |_| {}), None);
    let other_byte = |pages: &mut PagesMessage| {
        let of_process = |run: &PageRun| {
            run.content == PageContent::Bytes && matches!(run.space, MemorySpace::Process(_))
        };
        if pages.runs.first().is_some_and(of_process) {
            pages.bytes[100] ^= 1;
        }
    };
    let found = difference(&program, other_byte, |_| {}).expect("a changed byte is detected");
    assert!(found.contains(": memory "), "{found}");
    let other_register = |frozen: &mut ProcessTreeState| {
        let process = frozen.processes[0].as_mut().expect("a process");
        process.threads[0].registers.r15 ^= 1;
    };
    let found =
        difference(&program, |_| {}, other_register).expect("a changed register is detected");
    assert!(found.contains(": registers of thread "), "{found}");
    program.assert_runs_on();
    let tree = program.tree(&migration::Host::local());
    program.assert_good_verdict(tree);
}

/// The comparison covers guard pages, and the content of other pages in their mappings.
#[test]
fn differing_guard_pages_are_named() {
    let program = Program::start_feature("guard_pages");
    if let Some(missing_feature) = program.skipped() {
        return eprintln!("this machine has no {missing_feature}");
    }
    assert_eq!(difference(&program, |_| {}, |_| {}), None);
    let fewer = difference_with(
        &program,
        &TransferChanges {
            on_tree: &|tree| {
                tree.processes[0].guards.pop().expect("some");
            },
            ..TransferChanges::default()
        },
    );
    let fewer = fewer.expect("the change is detected");
    assert!(fewer.contains("guard pages of process "), "{fewer}");
    program.assert_runs_on();
    let tree = program.tree(&migration::Host::local());
    program.assert_good_verdict(tree);
}

/// The comparison covers data queued in pipes and sockets, shared open files, and locks.
#[test]
fn differing_descriptors_are_named() {
    let program = Program::start("queued_data");
    assert_eq!(difference_with(&program, &TransferChanges::default()), None);
    let difference_after = |change: &TransferChanges<'_>| {
        difference_with(&program, change).expect("the change is detected")
    };
    let with_more_data = |number: u32| {
        difference_after(&TransferChanges {
            on_restored: &move |root| write_into_copy(root, number),
            ..TransferChanges::default()
        })
    };
    assert!(with_more_data(21).contains(": queued data of descriptor 20 of process "));
    for (from, at) in [(22, 23), (23, 22), (25, 24)] {
        let text = format!(": queued data of descriptor {at} of process ");
        assert!(
            with_more_data(from).contains(&text),
            "{}",
            with_more_data(from)
        );
    }
    let unshared = difference_after(&TransferChanges {
        on_image: &|image| {
            let table = image.tables.values_mut().next().expect("a table");
            let other = table.slots[&28];
            table.slots.insert(27, other);
        },
        ..TransferChanges::default()
    });
    assert!(
        unshared.contains("sharing of the open file of descriptor 27 of process "),
        "{unshared}"
    );
    // A record lock, an open file description lock, and a flock.
    for index in 0..3 {
        let fewer = difference_after(&TransferChanges {
            on_image: &|image| {
                let files = image.files.values_mut();
                let locks = files.flat_map(|file| std::iter::once(&mut file.locks));
                let nonempty_locks = locks.filter(|locks| !locks.is_empty());
                let mut kinds = Vec::new();
                for locks in nonempty_locks {
                    locks.retain(|lock| {
                        let kind = std::mem::discriminant(&lock.holder);
                        if !kinds.contains(&kind) {
                            kinds.push(kind);
                        }
                        kinds.iter().position(|known| *known == kind) != Some(index)
                    });
                }
                assert_eq!(kinds.len(), 3);
            },
            ..TransferChanges::default()
        });
        assert!(fewer.contains(": locks of process "), "{fewer}");
    }
    program.assert_runs_on();
    let tree = program.tree(&migration::Host::local());
    program.assert_good_verdict(tree);
}

/// Whoever reads the command line of a process that is being restored reads memory at the address of the arguments. The
/// kernel would enlarge a stack above an address that is not mapped.
#[test]
fn arguments_of_process_being_restored_lie_in_mapped_memory() {
    /// Fields of `/proc/PID/stat`, counted from the one after the name: begin and end of arguments and environment.
    const ARGUMENTS_AND_ENVIRONMENT: std::ops::Range<usize> = 45..49;
    let program = Program::start("memory");
    let arguments_are_mapped = |root: i32| {
        let read = |file: &str| std::fs::read_to_string(format!("/proc/{root}/{file}"));
        let stat = read("stat").expect("readable");
        let (_, fields) = stat.rsplit_once(") ").expect("a name");
        let fields: Vec<u64> = (fields.split_whitespace())
            .map(|field| field.parse().unwrap_or(0))
            .collect();
        let maps = read("maps").expect("readable");
        let ranges: Vec<(u64, u64)> = (maps.lines())
            .filter_map(|line| line.split_once(' ')?.0.split_once('-'))
            .filter_map(|(start, end)| {
                let number = |text| u64::from_str_radix(text, 16).ok();
                Some((number(start)?, number(end)?))
            })
            .collect();
        for address in &fields[ARGUMENTS_AND_ENVIRONMENT] {
            let is_mapped = (ranges.iter()).any(|(start, end)| (start..end).contains(&address));
            assert!(is_mapped, "{address:x} is not in\n{maps}");
        }
    };
    let looked = TransferChanges {
        on_made: &arguments_are_mapped,
        ..TransferChanges::default()
    };
    assert_eq!(difference_with(&program, &looked), None);
    program.assert_runs_on();
    let tree = program.tree(&migration::Host::local());
    program.assert_good_verdict(tree);
}

/// Writes into a pipe of the copy, or through a socket of the copy to its other end.
fn write_into_copy(root: i32, number: u32) {
    let path = format!("/proc/{root}/fd/{number}");
    match std::fs::File::options().write(true).open(&path) {
        Ok(mut pipe) => pipe.write_all(b"!").expect("written"),
        Err(_) => {
            let pid = rustix::process::Pid::from_raw(root).expect("a number");
            let process = rustix::process::pidfd_open(pid, rustix::process::PidfdFlags::empty());
            let none = rustix::process::PidfdGetfdFlags::empty();
            let socket = process
                .and_then(|process| rustix::process::pidfd_getfd(process, number as i32, none))
                .expect("a copy");
            assert_eq!(rustix::io::write(socket, b"!").expect("sent"), 1);
        }
    }
}

/// Changes made to a program's images while they are transferred.
struct TransferChanges<'a> {
    on_tree: &'a dyn Fn(&mut TreeLayout),
    /// Looks at the restored tree before the state is there; the argument is the root's PID as the test sees it.
    on_made: &'a dyn Fn(i32),
    on_image: &'a dyn Fn(&mut FilesImage),
    on_pages: &'a dyn Fn(&mut PagesMessage),
    on_state: &'a dyn Fn(&mut ProcessTreeState),
    /// Changes the restored tree; the argument is the root's PID as the test sees it.
    on_restored: &'a dyn Fn(i32),
}

impl Default for TransferChanges<'_> {
    fn default() -> Self {
        Self {
            on_tree: &|_| {},
            on_made: &|_| {},
            on_image: &|_| {},
            on_pages: &|_| {},
            on_state: &|_| {},
            on_restored: &|_| {},
        }
    }
}

/// Restores a program with changes on the way, and returns the difference found. The original goes on.
fn difference(
    program: &Program,
    on_pages: impl Fn(&mut PagesMessage),
    on_state: impl Fn(&mut ProcessTreeState),
) -> Option<String> {
    let change = TransferChanges {
        on_pages: &on_pages,
        on_state: &on_state,
        ..TransferChanges::default()
    };
    difference_with(program, &change)
}

fn difference_with(program: &Program, change: &TransferChanges<'_>) -> Option<String> {
    let mut tracker = TreeTracker::start(program.pid()).expect("watched");
    let mut first = tracker.read_descriptors().expect("descriptors");
    let OpenFilesUpdate::Image(image) = &mut first.files else {
        panic!("the first reading is an image");
    };
    (change.on_image)(image);
    let stopped = tracker.freeze().map_err(|unfrozen| unfrozen.error);
    let mut stopped = stopped.expect("stops");
    let outcome = restore_changed(&first, &mut stopped, change);
    stopped.roll_back().expect("goes on");
    match outcome {
        Ok(()) => None,
        Err(Error::Refused(reason)) => Some(reason),
        Err(other) => panic!("{other}"),
    }
}

fn restore_changed(
    first: &DescriptorUpdate,
    stopped: &mut StoppedTree,
    change: &TransferChanges<'_>,
) -> Result<(), Error> {
    let mut restorer = migration::restorer();
    let mut tree = stopped.tree().clone();
    (change.on_tree)(&mut tree);
    restorer.update_tree(&tree)?;
    (change.on_made)(restorer.root()?.expect("a root"));
    while let Some(mut pages) = stopped.read_pages(1 << 20)? {
        (change.on_pages)(&mut pages);
        restorer.write_pages(pages)?;
    }
    restorer.update_descriptors(first, &BTreeMap::new())?;
    restorer.finish_descriptors(&stopped.read_descriptors()?, &BTreeMap::new())?;
    let state = stopped.read_state()?;
    let mut changed_state = state.clone();
    (change.on_state)(&mut changed_state);
    restorer.restore_state(&changed_state)?;
    (change.on_restored)(restorer.root()?.expect("a root"));
    restorer.compare_digest(&stopped.digest(&state)?)
}
