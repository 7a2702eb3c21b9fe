//! Figure 5c: "Socket data transferred during freeze phase of migration" (section VI D).

use anyhow::Result;

use super::figure5::{self, FigureContent, value_at};
use crate::repro::{Experiment, ExperimentOutcome, ExperimentSettings, Series, StatementCheck};
use holdfast_api::control::SocketStrategy;

pub(crate) const EXPERIMENT: Experiment = Experiment {
    name: "dve/figure5c",
    about: "bytes in the freeze of a zone server by number of connections, its sockets moved in three ways",
    run,
};

/// Numbers of connections at which incremental must move fewer bytes than collective.
const COMPARED_CONNECTIONS: [u32; 2] = [256, 1024];

fn run(settings: &ExperimentSettings) -> Result<ExperimentOutcome> {
    figure5::run(
        settings,
        &FigureContent {
            title: "Paper 002, figure 5c",
            y: "most bytes in the freeze",
            unit: "KiB",
            value_of: |of| of.status.freeze_bytes as f64 / 1024.0,
            paper: |_, _| None,
            checks,
        },
    )
}

fn checks(curves: &[(SocketStrategy, Series)]) -> Vec<StatementCheck> {
    let check = |connections: &u32| {
        let of = |way| value_at(curves, way, *connections);
        let (incremental, collective) = (
            of(SocketStrategy::Incremental)?,
            of(SocketStrategy::Collective)?,
        );
        Some(StatementCheck {
            statement: format!("{connections} connections: incremental fewer than collective"),
            holds: incremental < collective,
            seen: format!("{incremental:.0} KiB, {collective:.0} KiB"),
        })
    };
    COMPARED_CONNECTIONS.iter().filter_map(check).collect()
}
