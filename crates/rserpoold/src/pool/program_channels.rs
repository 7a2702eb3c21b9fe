//! Channels of programs: one task for each.

use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use holdfast_api::app::{Channel, Listener, decode, encode};
use holdfast_api::pool::{DATA_BYTES_MAX, FromPool, ToPool};
use holdfast_daemon::polled_socket::PolledSocket;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

use super::requests::{PoolRequest, ProgramQueue, program_queue};
use crate::mailbox::Mailbox;

/// Maximum number of a program's bytes in transit to its sessions, beyond which the daemon stops reading from the
/// program.
const UNSENT_BYTES_MAX: usize = 1 << 20;

/// Accepts programs, forever.
pub(super) async fn accept_programs(
    listener: PolledSocket<Listener>,
    mailbox: Mailbox<PoolRequest>,
) {
    let numbers = AtomicU64::new(1);
    loop {
        match listener.read(Listener::accept).await {
            Ok(channel) => {
                let number = numbers.fetch_add(1, Ordering::Relaxed);
                let prepared = channel
                    .set_nonblocking(true)
                    .and_then(|()| PolledSocket::new(channel));
                match prepared {
                    Ok(channel) => {
                        tokio::spawn(serve(number, channel, mailbox.clone()));
                    }
                    Err(error) => tracing::warn!(%error, "refused a program"),
                }
            }
            Err(error) => {
                tracing::error!(%error, "cannot accept programs");
                tokio::time::sleep(Duration::from_millis(100)).await;
            }
        }
    }
}

/// Serves one program until the program or the event loop ends the channel.
async fn serve(number: u64, channel: PolledSocket<Channel>, mailbox: Mailbox<PoolRequest>) {
    let (handle, queue) = program_queue();
    if !mailbox
        .send(PoolRequest::ProgramConnected(number, handle))
        .await
    {
        return;
    }
    // The first to end ends both: the program's last message, or the loop's.
    tokio::select! {
        read = read(number, &channel, &mailbox) => {
            if let Err(reason) = read {
                tracing::warn!(program = number, reason, "a program violated the protocol");
                if let Ok(bytes) = encode(&FromPool::Error(reason)) {
                    let _ = channel.get().send(&bytes, &[]);
                }
            }
        }
        () = write(&channel, queue) => {}
    }
    mailbox.send(PoolRequest::ProgramClosed(number)).await;
}

async fn write(channel: &PolledSocket<Channel>, mut queue: ProgramQueue) {
    while let Some(bytes) = queue.next().await {
        let sent = channel.write(|channel| channel.send(&bytes, &[])).await;
        if sent.is_err() {
            return;
        }
    }
}

async fn read(
    number: u64,
    channel: &PolledSocket<Channel>,
    mailbox: &Mailbox<PoolRequest>,
) -> Result<(), String> {
    let permits = Arc::new(Semaphore::new(UNSENT_BYTES_MAX));
    loop {
        let packet = match channel.read(Channel::receive).await {
            Ok(Some(packet)) => packet,
            Ok(None) => return Ok(()),
            Err(error) if error.kind() == io::ErrorKind::InvalidData => {
                return Err(error.to_string());
            }
            Err(_) => return Ok(()),
        };
        let message: ToPool = decode(&packet.bytes).map_err(|error| error.to_string())?;
        let permit = wait_permit(&message, &permits).await?;
        if !mailbox
            .send(PoolRequest::ProgramMessage(number, message, permit))
            .await
        {
            return Ok(());
        }
    }
}

/// Waits until the message's data fits the program's limit.
async fn wait_permit(
    message: &ToPool,
    permits: &Arc<Semaphore>,
) -> Result<Option<OwnedSemaphorePermit>, String> {
    let length = match message {
        ToPool::Data { bytes, .. } => bytes.len(),
        ToPool::StoreState { state, .. } => state.len(),
        _ => return Ok(None),
    };
    if length > DATA_BYTES_MAX {
        return Err(format!(
            "a message has {length} bytes, but at most {DATA_BYTES_MAX} are allowed; split it"
        ));
    }
    let length = u32::try_from(length).unwrap_or(u32::MAX);
    let permit = permits.clone().acquire_many_owned(length).await;
    // The semaphore is never closed.
    Ok(permit.ok())
}
