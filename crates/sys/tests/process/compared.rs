//! The restored tree is compared with the original, and each difference is named.

use crate::moving;
use crate::program::Program;
use holdfast_sys::process::donor::{StoppedTree, Tracker};
use holdfast_sys::process::error::Error;
use holdfast_sys::process::files::Image;
use holdfast_sys::process::image::{Content, Descriptors, Files, Frozen, Pages, Run, Space, Tree};
use std::collections::BTreeMap;
use std::io::Write;

#[test]
fn what_differs_is_named() {
    let program = Program::start_feature("anonymous");
    assert_eq!(made(&program, |_| {}, |_| {}), None);
    let other_byte = |pages: &mut Pages| {
        let of_process =
            |run: &Run| run.content == Content::Bytes && matches!(run.space, Space::Process(_));
        if pages.runs.first().is_some_and(of_process) {
            pages.bytes[100] ^= 1;
        }
    };
    let why = made(&program, other_byte, |_| {}).expect("another byte is seen");
    assert!(why.contains(": memory "), "{why}");
    let other_register = |frozen: &mut Frozen| {
        let process = frozen.processes[0].as_mut().expect("a process");
        process.threads[0].registers.r15 ^= 1;
    };
    let why = made(&program, |_| {}, other_register).expect("another register is seen");
    assert!(why.contains(": registers of thread "), "{why}");
    program.goes_on();
    let tree = program.tree(&moving::Host::own());
    program.ends_well(tree);
}

/// The comparison covers guard pages, and the content of other pages in their mappings.
#[test]
fn guard_pages_that_differ_are_named() {
    let program = Program::start_feature("guard_pages");
    if let Some(why) = program.skipped() {
        return eprintln!("this machine has no {why}");
    }
    assert_eq!(made(&program, |_| {}, |_| {}), None);
    let fewer = made_with(
        &program,
        &Change {
            on_tree: &|tree| {
                tree.processes[0].guards.pop().expect("some");
            },
            ..Change::default()
        },
    );
    let fewer = fewer.expect("it is seen");
    assert!(fewer.contains("guard pages of process "), "{fewer}");
    program.goes_on();
    let tree = program.tree(&moving::Host::own());
    program.ends_well(tree);
}

/// The comparison covers data queued in pipes and sockets, shared open files, and locks.
#[test]
fn descriptors_that_differ_are_named() {
    let program = Program::start("kept");
    assert_eq!(made_with(&program, &Change::default()), None);
    let why = |change: &Change<'_>| made_with(&program, change).expect("it is seen");
    let more = |number: u32| {
        why(&Change {
            on_made: &move |root| write_more(root, number),
            ..Change::default()
        })
    };
    assert!(more(21).contains(": what waits at descriptor 20 of process "));
    for (from, at) in [(22, 23), (23, 22), (25, 24)] {
        let text = format!(": what waits at descriptor {at} of process ");
        assert!(more(from).contains(&text), "{}", more(from));
    }
    let parted = why(&Change {
        on_image: &|image| {
            let table = image.tables.values_mut().next().expect("a table");
            let other = table.slots[&28];
            table.slots.insert(27, other);
        },
        ..Change::default()
    });
    assert!(
        parted.contains("who shares the open file of descriptor 27 of process "),
        "{parted}"
    );
    // A record lock, an open file description lock, and a flock.
    for place in 0..3 {
        let fewer = why(&Change {
            on_image: &|image| {
                let files = image.files.values_mut();
                let locks = files.flat_map(|file| std::iter::once(&mut file.locks));
                let kept = locks.filter(|locks| !locks.is_empty());
                let mut kinds = Vec::new();
                for locks in kept {
                    locks.retain(|lock| {
                        let kind = std::mem::discriminant(&lock.holder);
                        if !kinds.contains(&kind) {
                            kinds.push(kind);
                        }
                        kinds.iter().position(|known| *known == kind) != Some(place)
                    });
                }
                assert_eq!(kinds.len(), 3);
            },
            ..Change::default()
        });
        assert!(fewer.contains(": locks of process "), "{fewer}");
    }
    program.goes_on();
    let tree = program.tree(&moving::Host::own());
    program.ends_well(tree);
}

/// Writes into a pipe of the copy, or through a socket of the copy to its other end.
fn write_more(root: i32, number: u32) {
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
struct Change<'a> {
    on_tree: &'a dyn Fn(&mut Tree),
    on_image: &'a dyn Fn(&mut Image),
    on_pages: &'a dyn Fn(&mut Pages),
    on_state: &'a dyn Fn(&mut Frozen),
    /// Changes the restored tree; the argument is the root's PID as the test sees it.
    on_made: &'a dyn Fn(i32),
}

impl Default for Change<'_> {
    fn default() -> Self {
        Self {
            on_tree: &|_| {},
            on_image: &|_| {},
            on_pages: &|_| {},
            on_state: &|_| {},
            on_made: &|_| {},
        }
    }
}

/// Restores a program with changes on the way, and returns the difference found. The original goes on.
fn made(
    program: &Program,
    on_pages: impl Fn(&mut Pages),
    on_state: impl Fn(&mut Frozen),
) -> Option<String> {
    let change = Change {
        on_pages: &on_pages,
        on_state: &on_state,
        ..Change::default()
    };
    made_with(program, &change)
}

fn made_with(program: &Program, change: &Change<'_>) -> Option<String> {
    let mut tracker = Tracker::start(program.pid()).expect("watched");
    let mut first = tracker.descriptors().expect("descriptors");
    let Files::Image(image) = &mut first.files else {
        panic!("the first look gives all");
    };
    (change.on_image)(image);
    let stopped = tracker.freeze().map_err(|unfrozen| unfrozen.error);
    let mut stopped = stopped.expect("stops");
    let outcome = make(&first, &mut stopped, change);
    stopped.roll_back().expect("goes on");
    match outcome {
        Ok(()) => None,
        Err(Error::Refused(why)) => Some(why),
        Err(other) => panic!("{other}"),
    }
}

fn make(first: &Descriptors, stopped: &mut StoppedTree, change: &Change<'_>) -> Result<(), Error> {
    let mut restorer = moving::restorer();
    let mut tree = stopped.tree().clone();
    (change.on_tree)(&mut tree);
    restorer.tree(&tree)?;
    while let Some(mut pages) = stopped.read(1 << 20)? {
        (change.on_pages)(&mut pages);
        restorer.pages(pages)?;
    }
    restorer.descriptors(first, &BTreeMap::new())?;
    restorer.last_descriptors(&stopped.descriptors()?, &BTreeMap::new())?;
    let state = stopped.state()?;
    let mut given = state.clone();
    (change.on_state)(&mut given);
    restorer.frozen(&given)?;
    (change.on_made)(restorer.root()?.expect("a root"));
    restorer.compare(&stopped.digest(&state)?)
}
