//! Tests of the loaded server with which migrations are measured: its connections and memory are verified all the time.

use std::time::Duration;

use anyhow::{Result, ensure};
use holdfast_api::control::SocketStrategy;
use holdfast_lab::Topology;
use holdfast_testbed::process_moves::migrating_zone::{MigratingZone, MigratingZoneSpec};

/// Number of connections, one of them the probe.
const CONNECTIONS: usize = 16;

/// Moves the server there and back, with a freeze time for each move and no wrong byte.
pub fn migrate_without_database() -> Result<()> {
    migrate_loaded_server(false)
}

/// Moves the server there and back with a session to a database that is queried all the time.
pub fn migrate_with_database() -> Result<()> {
    migrate_loaded_server(true)
}

fn migrate_loaded_server(database: bool) -> Result<()> {
    let mut loaded = MigratingZone::start(&MigratingZoneSpec {
        name: format!("m-loaded-{}", std::process::id()),
        topology: Topology::default(),
        connections: CONNECTIONS,
        memory_mib: 8,
        dirty_mib_per_s: 4,
        database,
        post_copy: None,
    })?;
    for (from, to) in [("n2", "n3"), ("n3", "n2")] {
        let moved = loaded.move_server(SocketStrategy::default())?;
        ensure!((moved.from, moved.to) == (from, to), "{moved:?}");
        ensure!(moved.status.freeze_us > Some(0.0), "{moved:?}");
        // The amount shows that the server's memory was copied, not only the traces of connections.
        let memory = moved.status.copied_bytes + moved.status.saved_bytes;
        ensure!(memory > 8 << 20, "{moved:?}");
        std::thread::sleep(Duration::from_millis(200));
    }
    let results = loaded.end()?;
    ensure!(
        results.bytes_wrong == 0,
        "{} bytes wrong",
        results.bytes_wrong
    );
    ensure!(
        (results.queries > 0) == database && results.query_errors == 0,
        "{} queries, {} errors",
        results.queries,
        results.query_errors
    );
    ensure!(results.network.resets == 0, "{:?}", results.network);
    let gaps = &results.gaps;
    for seen_us in [&gaps.moves_us, &gaps.control_us] {
        ensure!(seen_us.len() == results.moves.len(), "{gaps:?}");
    }
    ensure!(
        gaps.moves_us.iter().all(|gap| *gap > 0.0),
        "{:?}",
        gaps.moves_us
    );
    Ok(())
}
