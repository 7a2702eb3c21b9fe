//! Frames about the health of servers.

use holdfast_wire::health_frames::{
    HealthFrame, ReportedServer, ServerProblem, ServerState, ServiceEndpoint, ServiceShares,
};
use holdfast_wire::{Frame, NodeId, Protocol};

/// Returns one frame of each kind.
pub fn frames() -> Vec<Frame> {
    let service = ServiceEndpoint {
        protocol: Protocol::Tcp,
        address: ([10, 0, 0, 1], 80).into(),
    };
    let states = [
        ServerState::Serving,
        ServerState::Absent,
        ServerState::Failing(ServerProblem::QueueStalled { waiting: 7 }),
    ];
    let servers = states.map(|state| ReportedServer { service, state });
    let shares = ServiceShares {
        service,
        weights: vec![(NodeId(1), 1), (NodeId(3), 2)],
        is_served: true,
    };
    [
        HealthFrame::Report {
            servers: servers.into(),
        },
        HealthFrame::Placement {
            services: vec![shares],
        },
    ]
    .map(Frame::Health)
    .into()
}
