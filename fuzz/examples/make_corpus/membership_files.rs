//! Datagrams between nodes, and saved memberships.

use holdfast_fuzz::datagram::{KEY, RECEIVER_BOOT, SENDER_BOOT};
use holdfast_fuzz::membership::{member, view};
use holdfast_wire::authenticated_datagram::{DatagramFrame, DatagramSender};
use holdfast_wire::membership_frames::{Heartbeat, JoinNumber, MembershipState, ServerListVersion};
use holdfast_wire::saved_membership::SavedMembership;

pub fn write_files() -> std::io::Result<()> {
    let own = member(1);
    let receiver = member(2).name;
    let heartbeat = DatagramFrame::Heartbeat(Heartbeat {
        epoch: 5,
        boot: 1,
        sequence: 9,
        has_lease: true,
        server_list: ServerListVersion {
            term: 1,
            changes: 3,
        },
    });
    let grant = DatagramFrame::LeaseGrant {
        epoch: 5,
        boot: 1,
        sequence: 9,
        join: JoinNumber(2),
    };
    let mut sender = DatagramSender::new(own.name.clone(), SENDER_BOOT);
    for (name, frame) in [("heartbeat", heartbeat), ("grant", grant)] {
        let datagram = sender.seal(&receiver, RECEIVER_BOOT, &KEY, &frame);
        crate::write_input("datagram", name, &datagram)?;
    }
    let voter = MembershipState {
        join: Some(own.join),
        committed: Some(view()),
        ..MembershipState::default()
    };
    for (name, state) in [("joining", MembershipState::default()), ("voter", voter)] {
        let saved = SavedMembership {
            group: "files".to_owned(),
            node: own.name.clone(),
            state,
        };
        let bytes = saved.encode().expect("a saved membership can be written");
        crate::write_input("saved_membership", name, &bytes)?;
    }
    Ok(())
}
