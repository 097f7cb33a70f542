//! Calls go through to their end. The protocol's server gives one up in its midst when the connection
//! is lost, as when containerd is killed: half a container would be left, which nobody could remove.

use std::sync::Arc;

use async_trait::async_trait;
use containerd_shim_protos::ttrpc;
use containerd_shim_protos::ttrpc::asynchronous::{MethodHandler, Service, TtrpcContext};

use crate::error::Error;

type Method = dyn MethodHandler + Send + Sync;

/// Those that may be given up: they do nothing but wait.
const WAIT: &str = "Wait";

/// A method that is not given up.
struct Whole(Arc<Method>);

#[async_trait]
impl MethodHandler for Whole {
    async fn handler(
        &self,
        context: TtrpcContext,
        request: ttrpc::Request,
    ) -> ttrpc::Result<ttrpc::Response> {
        let method = self.0.clone();
        let called = tokio::spawn(async move { method.handler(context, request).await });
        called.await.unwrap_or_else(|error| Err(Error::Unavailable(error.to_string()).into()))
    }
}

/// Makes all methods of a service so.
pub fn whole(service: Service) -> Service {
    let whole = |(name, method): (String, Box<Method>)| {
        let method: Box<Method> =
            if name.ends_with(WAIT) { method } else { Box::new(Whole(Arc::from(method))) };
        (name, method)
    };
    Service { methods: service.methods.into_iter().map(whole).collect(), ..service }
}

#[cfg(test)]
mod tests {
    use std::collections::HashMap;
    use std::time::Duration;

    use tokio::sync::mpsc;

    use super::*;

    /// Says that it has begun, and that it has ended.
    struct Slow(mpsc::UnboundedSender<&'static str>);

    #[async_trait]
    impl MethodHandler for Slow {
        async fn handler(
            &self,
            _: TtrpcContext,
            _: ttrpc::Request,
        ) -> ttrpc::Result<ttrpc::Response> {
            self.0.send("begun").unwrap();
            tokio::time::sleep(Duration::from_millis(20)).await;
            self.0.send("ended").unwrap();
            Ok(ttrpc::Response::default())
        }
    }

    /// What is said by a method whose caller goes away when it has begun.
    async fn given_up(name: &str) -> Vec<&'static str> {
        let (sender, mut said) = mpsc::unbounded_channel();
        let methods = HashMap::from([(name.to_owned(), Box::new(Slow(sender)) as Box<Method>)]);
        let mut service = whole(Service { methods, streams: HashMap::new() });
        let method = service.methods.remove(name).unwrap();
        let mut all = Vec::new();
        {
            let call = method.handler(TtrpcContext::default(), ttrpc::Request::default());
            tokio::select! {
                _ = call => panic!("it is slow"),
                word = said.recv() => all.extend(word),
            }
        }
        drop(method);
        while let Some(word) = said.recv().await {
            all.push(word);
        }
        all
    }

    #[tokio::test]
    async fn a_call_goes_on_without_its_caller() {
        assert_eq!(given_up("/containerd.task.v2.Task/Create").await, ["begun", "ended"]);
        assert_eq!(given_up("/containerd.task.v2.Task/Wait").await, ["begun"]);
    }
}
