//! The transfer of a process's memory, beside which packets of clients arrive.

use anyhow::{Result, ensure};
use holdfast_testbed::network_counters::NetworkCounters;

use crate::faults::{ACCEPTOR, DONOR};
use crate::world::MigrationGroup;

/// Number of moves: a queue overflows in some of them only.
const MOVES: usize = 6;

/// Most segments that are sent again although no queue overflows: a busy machine lets an acknowledgement come late.
const SENT_AGAIN_MAX: u64 = 20;

/// Moves a program with much written memory there and back. A packet is only lost here if the queue of a virtual interface
/// overflows, and then packets of clients are lost, too.
pub fn memory_transfer_overflows_no_queue(world: &MigrationGroup) -> Result<()> {
    let hot = world.start_program(DONOR, &[], "hot", &[])?;
    let before = NetworkCounters::read(&world.cluster)?;
    for (from, to) in [(DONOR, ACCEPTOR), (ACCEPTOR, DONOR)]
        .into_iter()
        .cycle()
        .take(MOVES)
    {
        world.move_to(world.pid_on(from, &hot)?, from, to)?;
    }
    let counters = NetworkCounters::read(&world.cluster)?.since(&before);
    // A probe may also send new data.
    let sent_again = counters.retransmits.saturating_sub(counters.loss_probes);
    ensure!(sent_again <= SENT_AGAIN_MAX, "{counters:?}");
    world.end(&hot)
}
