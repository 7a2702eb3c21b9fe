//! Common code of figures 5b and 5c: a zone server with connections, moved in the paper's three ways (section VI D).

use anyhow::Result;

use crate::migrate::lab_topology;
use crate::repro::{
    Estimate, ExperimentOutcome, ExperimentSettings, Figure, Panel, Point, Series, StatementCheck,
};
use holdfast_api::control::SocketStrategy;
use holdfast_testbed::process_moves::CompletedMove;
use holdfast_testbed::process_moves::migrating_zone::{MigratingZone, MigratingZoneSpec};

/// Numbers of connections: "the number of clients varies from 16 up to 1024" (section VI D).
const CONNECTIONS: [u32; 4] = [16, 64, 256, 1024];
/// Moves for each point; the worst one counts.
const MOVES_PER_POINT: u32 = 20;
/// Rate of the links, Mbit/s: "interconnected by a Gigabit Ethernet network" (section VI A).
const LINK_MBIT: u32 = 1000;
/// Memory of the server, MiB, most of which never changes.
const MEMORY_MIB: usize = 16;
const STRATEGIES: [SocketStrategy; 3] = [
    SocketStrategy::Iterative,
    SocketStrategy::Collective,
    SocketStrategy::Incremental,
];

/// Content of a figure.
pub(super) struct FigureContent {
    pub title: &'static str,
    pub y: &'static str,
    pub unit: &'static str,
    /// Returns the value of a move, in `unit`.
    pub value_of: fn(&CompletedMove) -> f64,
    /// Returns the value in the paper's text for this way and number of connections.
    pub paper: fn(SocketStrategy, u32) -> Option<f64>,
    /// Checks the measured curves.
    pub checks: fn(&[(SocketStrategy, Series)]) -> Vec<StatementCheck>,
}

/// Measures each way with each number of connections.
pub(super) fn run(
    settings: &ExperimentSettings,
    shown: &FigureContent,
) -> Result<ExperimentOutcome> {
    let mut notes = notes(settings);
    let mut curves = Vec::new();
    for way in STRATEGIES {
        match measure_curve(settings, way, shown) {
            Ok(series) => curves.push((way, series)),
            Err(error) if is_refused(&error) => {
                notes.push(format!("{}: not measured: {error}", way.name()));
            }
            Err(error) => return Err(error),
        }
    }
    let panel = Panel {
        title: "a zone server".to_owned(),
        x: "connections".to_owned(),
        y: shown.y.to_owned(),
        unit: shown.unit.to_owned(),
        y_log: true,
        series: curves.iter().map(|(_, series)| series.clone()).collect(),
    };
    let figure = Figure {
        title: shown.title.to_owned(),
        panels: vec![panel],
    };
    let mut outcome = ExperimentOutcome::from_figure(figure, notes);
    outcome.checks = (shown.checks)(&curves);
    Ok(outcome)
}

/// Returns true if the daemon refused a way before the move began.
fn is_refused(error: &anyhow::Error) -> bool {
    error
        .chain()
        .any(|cause| cause.to_string().contains(REFUSED_TEXT))
}

/// Text of the error with which [`holdfast_testbed::process_moves::NodeGroup::migrate`] reports a refusal by the daemon.
const REFUSED_TEXT: &str = "the daemon refused the request";

fn notes(settings: &ExperimentSettings) -> Vec<String> {
    vec![
        format!(
            "worst of {} moves per point, {LINK_MBIT} Mbit/s between the nodes; each client sends 20 messages of 256 \
             bytes per second;",
            settings.repeats_or(MOVES_PER_POINT)
        ),
        format!(
            "the server has {MEMORY_MIB} MiB of memory, and writes only the pages that it needs to serve; bytes are \
             everything sent in"
        ),
        "the freeze, including memory. The server has a session with MariaDB on a third node, and queries it 20 times \
         per second;".to_owned(),
        "from the commit on, that node sends to the server's new node".to_owned(),
    ]
}

fn measure_curve(
    settings: &ExperimentSettings,
    way: SocketStrategy,
    shown: &FigureContent,
) -> Result<Series> {
    let mut points = Vec::new();
    for connections in settings.sizes_or(&CONNECTIONS) {
        let spec = MigratingZoneSpec {
            name: format!("dve-{}-{connections}", std::process::id()),
            topology: lab_topology(Some(LINK_MBIT)),
            connections: connections as usize,
            memory_mib: MEMORY_MIB,
            dirty_mib_per_s: 0,
            database: true,
            post_copy: None,
        };
        let mut loaded = MigratingZone::start(&spec)?;
        let mut worst = 0.0_f64;
        // An even number of moves ends the server at its first node.
        for _ in 0..settings.repeats_or(MOVES_PER_POINT).next_multiple_of(2) {
            worst = worst.max((shown.value_of)(loaded.move_server(way)?));
        }
        let seen = loaded.end()?;
        anyhow::ensure!(seen.bytes_wrong == 0, "{} bytes wrong", seen.bytes_wrong);
        anyhow::ensure!(
            seen.queries > 0 && seen.query_errors == 0,
            "the session with the database: {} queries, {} errors",
            seen.queries,
            seen.query_errors
        );
        eprintln!(
            "{}, {connections} connections: {worst:.1} {}",
            way.name(),
            shown.unit
        );
        points.push(Point {
            x: f64::from(connections),
            ours: Estimate::from_repeats(&[worst]),
            paper: (shown.paper)(way, connections),
        });
    }
    Ok(Series {
        name: way.name().to_owned(),
        points,
    })
}

/// Returns the value of a way at a number of connections.
pub(super) fn value_at(
    curves: &[(SocketStrategy, Series)],
    way: SocketStrategy,
    connections: u32,
) -> Option<f64> {
    let (_, series) = curves.iter().find(|(of, _)| *of == way)?;
    let mut points = series.points.iter();
    let point = points.find(|point| point.x == f64::from(connections))?;
    Some(point.ours.mean)
}
