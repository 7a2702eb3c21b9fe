//! Pages that vanish between the scan of a round and its reads.

use crate::migration;
use crate::program::Program;
use holdfast_checkpoint::acceptor::Restorer;
use holdfast_checkpoint::donor::TreeTracker;
use holdfast_lab::testing::wait_for;
use std::collections::BTreeMap;

/// The acceptor has an older version of pages that a round could not read any more. At the freeze, the memory is there again
/// and empty.
#[test]
fn acceptor_drops_old_version_of_unread_pages() {
    let program = Program::start("replaces_memory");
    let tell = |command: &str, done: &str| {
        program.create_file(command);
        wait_for(done, || program.has_written(done));
    };
    let mut restorer = migration::restorer();
    let mut tracker = TreeTracker::start(program.pid()).expect("tracked");
    let copy_round =
        |tracker: &mut TreeTracker, restorer: &mut Restorer, before_reads: &dyn Fn()| {
            let mut round = tracker.next_round().expect("a round");
            restorer.update_tree(&round.tree).expect("made");
            before_reads();
            while let Some(pages) = tracker.read_pages(&mut round, 1 << 20).expect("read") {
                restorer.write_pages(pages).expect("written");
            }
        };
    copy_round(&mut tracker, &mut restorer, &|| {});
    tell("write", "written");
    copy_round(&mut tracker, &mut restorer, &|| tell("unmap", "unmapped"));
    tell("map", "mapped");
    let first = tracker.read_descriptors().expect("descriptors");
    let stopped = tracker.freeze().map_err(|failure| failure.error);
    let mut stopped = stopped.expect("stops");
    restorer.update_tree(stopped.tree()).expect("made");
    while let Some(pages) = stopped.read_pages(1 << 20).expect("read") {
        restorer.write_pages(pages).expect("written");
    }
    restorer
        .update_descriptors(&first, &BTreeMap::new())
        .expect("opened");
    let last = stopped.read_descriptors().expect("descriptors");
    restorer
        .finish_descriptors(&last, &BTreeMap::new())
        .expect("opened");
    let state = stopped.read_state().expect("a state");
    restorer.restore_state(&state).expect("restored");
    let digest = stopped.digest(&state).expect("a digest");
    restorer.compare_digest(&digest).expect("the copy is equal");
    stopped.roll_back().expect("goes on");
    let tree = program.tree(&migration::Host::local());
    program.assert_good_verdict(tree);
}
