//! Echo over UDP. An association has no state: each datagram is independent.

use std::future::{Future, poll_fn};
use std::sync::Arc;
use std::task::Poll;
use std::time::Duration;

use holdfast_api::{Association, Destination, UdpEvent, UdpService};

/// An association that was silent for this long is forgotten.
const IDLE_MAX: Duration = Duration::from_secs(60);

/// Serves forever.
pub async fn serve(service: UdpService) {
    let service = Arc::new(service);
    let mut sweep = tokio::time::interval(IDLE_MAX / 4);
    loop {
        let event = tokio::select! {
            event = service.receive() => event,
            _ = sweep.tick() => {
                service.forget_idle(IDLE_MAX);
                continue;
            }
        };
        match event {
            Ok(UdpEvent::Datagram { association, data }) => {
                if let Err(error) = service.send(&association, &data).await {
                    tracing::debug!(flow = %association.flow(), %error, "cannot send an answer");
                }
            }
            Ok(UdpEvent::HandedOff { .. }) => {}
            Ok(UdpEvent::HandoffRequested {
                association,
                destination,
            }) => {
                let mut handing =
                    Box::pin(hand_off(Arc::clone(&service), association, destination));
                // Start the handoff here, between two datagrams, and complete it in another task: datagrams received
                // before are answered, later ones travel with the association.
                let first_poll =
                    poll_fn(|context| Poll::Ready(handing.as_mut().poll(context))).await;
                if first_poll.is_pending() {
                    tokio::spawn(handing);
                }
            }
            Err(error) => {
                tracing::warn!(%error, "cannot receive a datagram");
                tokio::time::sleep(Duration::from_millis(10)).await;
            }
        }
    }
}

async fn hand_off(service: Arc<UdpService>, association: Association, destination: Destination) {
    let outcome = service.hand_off(&association, destination, Vec::new());
    if let Err(kept) = outcome.await {
        tracing::debug!(flow = %association.flow(), reason = %kept.reason, "handoff failed");
    }
}
