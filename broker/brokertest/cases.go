package brokertest

// cases is the contract, one promise a line.
var cases = []testCase{
	{"FieldsSurvive", "id, topic, key, payload, time and operation arrive as they were given", fieldsSurvive, false},
	{"HeadersSurvive", "headers keep their bytes, repeats and order", headersSurvive, false},
	{"OddHeadersSurvive", "header names and values that the broker's own protocol cannot carry arrive as they were given", oddHeadersSurvive, false},
	{"HeaderLookupIgnoresCase", "a header is found in any case, and keeps its own", headerLookup, false},
	{"ArgumentsUntouched", "Publish changes nothing that the caller owns, and the receiver owns what it gets", argumentsUntouched, false},
	{"OneResultPerMessage", "Publish returns one result for each message, also for none", oneResult, false},
	{"OversizeIsRefused", "a message that is too large is refused alone", oversizeIsRefused, false},
	{"InvalidTopicIsRefused", "a message with an invalid topic is refused alone", invalidTopicIsRefused, false},
	{"UnknownTopicIsUnreachable", "an unknown topic is unreachable, is named as the scope, and is not made", unknownTopic, false},
	{"SameIDOnTwoTopics", "one id on two topics is two messages", sameIDOnTwoTopics, false},
	{"KeyOrder", "messages of one topic and key are delivered in the order in which they were published", keyOrder, false},
	{"FailureStopsItsKey", "after a message failed, the rest of its key is not tried and not stored, and other keys are", failureStopsItsKey, false},
	{"CancelledPublish", "Publish returns soon after its context ends, and says stored only of what is", cancelledPublish, false},
	{"ConcurrentPublishers", "several goroutines may publish at a time", concurrentPublishers, false},
	{"PublishAfterClose", "Publish after Close reports ErrClosed, and a second Close returns nil", publishAfterClose, false},
	{"CloseEndsPublish", "Close makes running Publish calls return", closeEndsPublish, false},

	{"NewGroupStartsAtTheFirst", "a new group is given what was published before it", newGroup, false},
	{"SubscribeUnknownTopic", "subscribing to an unknown topic is an error, and does not make it", subscribeUnknown, false},
	{"PositionAndCount", "a delivery knows its topic, its place and how often it was delivered", positionAndCount, false},
	{"RetryRedelivers", "a message given back comes again after about the delay", retryRedelivers, false},
	{"AckIsNotRedelivered", "an acknowledged message does not come again, also to a later member", ackIsNotRedelivered, false},
	{"KilledSubscriber", "what a killed member had not settled goes to another", killedSubscriber, false},
	{"GroupsAreIndependent", "each group is given all messages", groupsAreIndependent, false},
	{"MembersShare", "the members of a group share the messages", membersShare, false},
	{"SlowHandlerKeepsItsMessage", "a delivery is kept alive until it is settled, and is not given to another", slowHandler, false},
	{"Drain", "Subscribe waits until its deliveries are settled, and they still can be", drain, false},
	{"MaxInFlight", "no more than MaxInFlight deliveries are unsettled", maxInFlight, false},

	{"NoGoroutineLeft", "closing leaves no goroutine behind", noGoroutineLeft, true},
	{"Outage", "during an outage publishing is unreachable; afterwards everything goes on by itself", outage, true},
}
