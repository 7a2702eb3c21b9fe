//! Echo over UDP. The state of an association is nothing: each datagram stands alone.

use std::sync::Arc;
use std::time::Duration;

use holdfast_api::{UdpEvent, UdpService};

/// An association that was silent for so long is forgotten.
const IDLE_MAX: Duration = Duration::from_secs(60);

/// Serves for ever.
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
                    tracing::debug!(flow = %association.flow(), %error, "not sent");
                }
            }
            Ok(UdpEvent::HandedOff { .. }) => {}
            Ok(UdpEvent::Asked {
                association,
                destination,
            }) => {
                let service = Arc::clone(&service);
                tokio::spawn(async move {
                    if let Err(kept) = service
                        .hand_off(&association, destination, Vec::new())
                        .await
                    {
                        tracing::debug!(flow = %association.flow(), reason = %kept.reason, "kept");
                    }
                });
            }
            Err(error) => {
                tracing::warn!(%error, "not received");
                tokio::time::sleep(Duration::from_millis(10)).await;
            }
        }
    }
}
