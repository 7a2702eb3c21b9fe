//! What was made of a program is compared with the program, and what differs is named.

use crate::moving;
use crate::program::Program;
use holdfast_sys::process::donor::{StoppedTree, Tracker};
use holdfast_sys::process::error::Error;
use holdfast_sys::process::image::{Content, Descriptors, Frozen, Pages, Run, Space};
use std::collections::BTreeMap;

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

/// Makes a program elsewhere, with something changed on its way; says what differs. The program goes on.
fn made(
    program: &Program,
    on_pages: impl Fn(&mut Pages),
    on_state: impl Fn(&mut Frozen),
) -> Option<String> {
    let mut tracker = Tracker::start(program.pid()).expect("watched");
    let first = tracker.descriptors().expect("descriptors");
    let stopped = tracker.freeze().map_err(|unfrozen| unfrozen.error);
    let mut stopped = stopped.expect("stops");
    let outcome = make(&first, &mut stopped, on_pages, on_state);
    stopped.roll_back().expect("goes on");
    match outcome {
        Ok(()) => None,
        Err(Error::Refused(why)) => Some(why),
        Err(other) => panic!("{other}"),
    }
}

fn make(
    first: &Descriptors,
    stopped: &mut StoppedTree,
    on_pages: impl Fn(&mut Pages),
    on_state: impl Fn(&mut Frozen),
) -> Result<(), Error> {
    let mut restorer = moving::restorer();
    restorer.tree(stopped.tree())?;
    while let Some(mut pages) = stopped.read(1 << 20)? {
        on_pages(&mut pages);
        restorer.pages(pages)?;
    }
    restorer.descriptors(first, &BTreeMap::new())?;
    restorer.last_descriptors(&stopped.descriptors()?, &BTreeMap::new())?;
    let state = stopped.state()?;
    let mut given = state.clone();
    on_state(&mut given);
    restorer.frozen(&given)?;
    restorer.compare(&stopped.digest(&state)?)
}
